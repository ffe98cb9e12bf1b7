"""Where kvledger meets the world: vLLM, other connectors, the command line. It may import everything."""
