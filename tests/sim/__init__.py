"""A world around vLLM's real scheduler: real hooks, real copies on CPU tensors, a model made of hashes."""
