"""Runs connectors to prove them: simulated engines, conformance, incidents as tests, the demo."""
