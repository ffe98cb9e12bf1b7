"""Connects kvledger to vLLM, other connectors and the command line. This package may import everything."""
