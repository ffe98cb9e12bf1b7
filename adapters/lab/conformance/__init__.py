"""The contract that vLLM expects of a connector, and the code that checks any connector against it.

`obligations.py` has the contract and needs no optional dependency. The other modules drive vLLM's real scheduler.
"""
