"""Messages for operators: structlog over vLLM's own logger, bound once, silent on the hot path.

Each begins with kvledger's name, since vLLM's prefix says only in which process and line it was made.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import structlog
from structlog.typing import EventDict, WrappedLogger

from kvledger.lifecycle import ConfigurationError, without_credentials


def _as_text(_logger: WrappedLogger, _method: str, event: EventDict) -> str:
    """`kvledger: what happened (name=value, …)`."""
    said = event.pop("event")
    values = ", ".join(f"{name}={value!r}" for name, value in event.items())
    return without_credentials(f"kvledger: {said} ({values})" if values else f"kvledger: {said}")


messages: structlog.stdlib.BoundLogger = structlog.wrap_logger(
    # A child of vLLM's logger: its level, handlers and format apply without any configuration of ours.
    logging.getLogger("vllm.kvledger"),
    wrapper_class=structlog.stdlib.BoundLogger,
    processors=[structlog.stdlib.filter_by_level, _as_text],
    cache_logger_on_first_use=True,
)


@contextlib.contextmanager
def refusals_are_said() -> Iterator[None]:
    """Say a refusal before it is raised: vLLM ends with tracebacks, in which it is hard to find."""
    try:
        yield
    except ConfigurationError as error:
        messages.error(f"{error}\n  `kvledger check` says what a configuration would do, without an engine")
        raise
