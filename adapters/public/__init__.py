"""kvledger: a KV-cache connector for vLLM that writes everything it sees and decides into a log, and reads such logs.

`import kvledger` imports nothing else. The parts are imported by their own names: `kvledger.lifecycle` is the core,
`kvledger.storage` keeps events and KV pages, and `kvledger.adapters` connects both to vLLM and to people.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvledger.lifecycle import __version__

__all__ = ["__version__"]


if not TYPE_CHECKING:  # for a type checker only the names above exist

    def __getattr__(name: str) -> object:
        """Import what is asked for, when it is first asked for."""
        if name not in __all__:
            raise AttributeError(f"module 'kvledger' has no attribute {name!r}")
        from kvledger.lifecycle import __version__ as value  # noqa: PLC0415 -- see the docstring above

        globals()[name] = value
        return value
