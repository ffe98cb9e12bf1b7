"""Messages for operators, through vLLM's own logger.

Each message begins with kvledger's name, because vLLM's prefix names only the process and the line of code.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import structlog
from structlog.typing import EventDict, WrappedLogger

from kvledger.lifecycle import ConfigurationError, suppressed, without_credentials


def _as_text(_logger: WrappedLogger, _method: str, event: EventDict) -> str:
    """Return the message in the form `kvledger: what happened (name=value, …)`."""
    text = event.pop("event")
    values = ", ".join(f"{name}={value!r}" for name, value in event.items())
    return without_credentials(f"kvledger: {text} ({values})" if values else f"kvledger: {text}")


_HINT = "  run `kvledger check` with this configuration to find such errors before vLLM loads weights"


class _Messages(structlog.stdlib.BoundLogger):
    """A logger that never raises, even if a filter or a handler of the server's logging does."""

    def _proxy_to_logger(self, method_name: str, event: str | None = None, *event_args: str, **event_kw: Any) -> None:
        with suppressed():
            super()._proxy_to_logger(method_name, event, *event_args, **event_kw)


messages: structlog.stdlib.BoundLogger = structlog.wrap_logger(
    # A child of vLLM's logger, so its level, handlers and format apply without configuration.
    logging.getLogger("vllm.kvledger"),
    wrapper_class=_Messages,
    processors=[structlog.stdlib.filter_by_level, _as_text],
    cache_logger_on_first_use=True,
)


@contextlib.contextmanager
def refusals_are_said() -> Iterator[None]:
    """Log a refused configuration before its error is raised, because vLLM's tracebacks make the error hard to find.

    vLLM creates connectors after it has loaded the weights. The message therefore also names a command that finds such
    errors sooner. The error gets this hint as a note, which tracebacks print below the reason.
    """
    try:
        yield
    except ConfigurationError as error:
        if _HINT not in getattr(error, "__notes__", ()):  # else an inner connector has logged it
            error.add_note(_HINT)
            messages.error(f"{error}\n{_HINT}")
        raise
