"""Marks for tests of what one release of vLLM does and a later one no longer does."""

from __future__ import annotations

import pytest
from packaging.version import Version

from kvledger.adapters.vllm.versions import vllm_version

mended_in_0_33 = pytest.mark.xfail(
    Version(vllm_version()) >= Version("0.33.dev0"), reason="vLLM 0.33 has mended it", strict=True
)
"""A defect that the test shows in 0.32, and does not find from 0.33 on."""
