"""The version of this release. The build reads it from here; otherwise only CITATION.cff contains it."""

__version__ = "0.1.0"
"""Version of the whole distribution. `kvledger.__version__` is this one, so that the core imports nothing from
outside."""
