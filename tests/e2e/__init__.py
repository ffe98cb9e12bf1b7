"""Real vLLM on CPU, the connector, and what both did: outputs, the scheduler as it was seen, and the log."""
