"""The contract that vLLM expects of a connector, and the code that checks any connector against it.

`obligations.py` has the contract and needs no optional dependency. Everything else drives vLLM's real scheduler.
"""
