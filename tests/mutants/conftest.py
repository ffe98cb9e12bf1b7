"""Mistakes make the connector speak, and rightly so: what failed should not drown in it."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def quiet_connector() -> Iterator[None]:
    """Silence kvledger's messages."""
    logger = logging.getLogger("vllm.kvledger")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)
