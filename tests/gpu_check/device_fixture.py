"""The one fixture that the CUDA tests ask for, where they run without the development environment."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def cuda() -> torch.device:
    """A device."""
    return torch.device("cuda")
