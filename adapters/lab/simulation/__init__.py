"""An engine without a model: vLLM's real scheduler, both sides of a connector, and hashes instead of KV.

It runs a connector without weights and without a device, for `kvledger conformance`, `kvledger repro` and kvledger's
tests. Importing this package, without its modules, does not import vLLM.
"""
