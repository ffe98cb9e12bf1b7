"""Runs connectors without a vLLM server."""
