"""An engine without a model: vLLM's real scheduler, a connector on both sides, KV that is a hash of what it should be.

Runs a connector without weights and devices, for `kvledger conformance`, `kvledger repro` and kvledger's own tests.
Nothing of vLLM is imported before a module here is.
"""
