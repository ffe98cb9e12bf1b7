"""kvledger: a KV-cache connector for vLLM that logs every event and decision, and tools to read such logs.

This prints why the tokens of a request were computed:

    import kvledger

    for reason in kvledger.open_log("logs").request("chat-17").why():
        print(reason)

`open_log` takes one log, or a folder with the logs of several engine starts. It needs neither vLLM nor torch, and
returns a `Log`. A `Log` has the entries, requests, lookups, copies, steps and evictions of the log. Its method `verify`
checks the log against all rules, and its methods `to_arrow` and `to_pandas` return tables.

`import kvledger` imports no other module. Each name below is imported on first use. `kvledger.lifecycle` is the core,
`kvledger.storage` keeps events and KV pages, and `kvledger.adapters` connects both to vLLM and to the command line.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvledger.adapters.tools.api import (
        Advance,
        Copy,
        Damage,
        Divergence,
        Entry,
        Error,
        Eviction,
        Finding,
        Life,
        Log,
        LogNotFound,
        LogReport,
        LogUnreadable,
        Lookup,
        Reason,
        ReasonCode,
        Report,
        Request,
        RequestAmbiguous,
        RequestNotFound,
        Start,
        Step,
        Verdict,
        Violation,
        open_log,
    )
    from kvledger.lifecycle import __version__

__all__ = [
    "Advance",
    "Copy",
    "Damage",
    "Divergence",
    "Entry",
    "Error",
    "Eviction",
    "Finding",
    "Life",
    "Log",
    "LogNotFound",
    "LogReport",
    "LogUnreadable",
    "Lookup",
    "Reason",
    "ReasonCode",
    "Report",
    "Request",
    "RequestAmbiguous",
    "RequestNotFound",
    "Start",
    "Step",
    "Verdict",
    "Violation",
    "__version__",
    "open_log",
]


if not TYPE_CHECKING:  # a type checker knows the names above, and no others

    def __getattr__(name: str) -> object:
        """Import a name on first use."""
        if name not in __all__:
            raise AttributeError(f"module 'kvledger' has no attribute {name!r}")
        from importlib import import_module  # noqa: PLC0415 -- a program that asks for nothing pays for nothing

        module = import_module("kvledger.lifecycle" if name == "__version__" else "kvledger.adapters.tools.api")
        value = globals()[name] = getattr(module, name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
