"""What vLLM expects of a connector, as data, and a command's worth of code that holds any connector against it.

`obligations.py` is the contract; it needs nothing that an extra brings. Everything else drives vLLM's real scheduler.
"""
