"""Code that several tools share: it finds a log and its requests, reads events, and judges the log and its end.

This package must not depend on commands, pages, vLLM or torch.
"""
