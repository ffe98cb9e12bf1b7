"""What several tools need of a stored log: its path, its events, a request in it, its end, the verdict.

This package must not know commands, pages, vLLM or torch.
"""
