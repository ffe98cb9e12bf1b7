"""The release that this code is of. The build reads it from here; no other file says it but CITATION.cff."""

__version__ = "0.1.0"
"""Of the whole distribution. `kvledger.__version__` is this one, so that the core imports nothing of ours."""
