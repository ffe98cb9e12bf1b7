"""The version of this release. The build reads it from here. The only other file that contains it is CITATION.cff."""

__version__ = "0.1.0"
"""Version of the whole distribution, also available as `kvledger.__version__`. It is defined here because the core must
import nothing from outside."""
