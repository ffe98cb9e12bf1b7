"""Messages for operators: structlog over vLLM's own logger, bound once, silent on the hot path."""

from __future__ import annotations

import logging

import structlog

messages: structlog.stdlib.BoundLogger = structlog.wrap_logger(
    # A child of vLLM's logger: its level, handlers and format apply without any configuration of ours.
    logging.getLogger("vllm.kvledger"),
    wrapper_class=structlog.stdlib.BoundLogger,
    processors=[
        structlog.stdlib.filter_by_level,
        structlog.processors.KeyValueRenderer(key_order=["event"], drop_missing=True),
    ],
    cache_logger_on_first_use=True,
)
