"""An engine without a model: vLLM's real scheduler, both sides of a connector, and hashes instead of KV.

It runs a connector without weights and devices, for `kvledger conformance`, `kvledger repro` and kvledger's tests.
Importing only the package does not import vLLM.
"""
