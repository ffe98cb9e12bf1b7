"""Connects kvledger to vLLM, other connectors and the command line. It may import everything."""
