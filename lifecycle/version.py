"""The release that this code is of. The build reads it from here; no other file says it but CITATION.cff."""

__version__ = "0.1.0"
"""Of the whole distribution. `kvledger` itself is a namespace without a file, so that the core has it."""
