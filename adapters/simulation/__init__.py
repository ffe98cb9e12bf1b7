"""An engine without a model: vLLM's real scheduler, a connector on both sides, KV that is a hash of what it should be.

For whoever wants to see a connector run without weights and devices: `kvledger conformance`, and kvledger's own tests.
Nothing of vLLM is imported before a module here is.
"""
