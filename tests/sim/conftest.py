"""Worlds break things on purpose, and the connector rightly speaks of each: what failed should not drown in it."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def quiet_connector() -> Iterator[None]:
    """Silence kvledger's messages; the transcript of a seed tells the same."""
    logger = logging.getLogger("vllm.kvledger")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)
