"""What the connector brings into vLLM's process."""

from __future__ import annotations

import subprocess
import sys


def test_importing_the_connector_loads_no_numba() -> None:
    """Numba loaded before the worker starts crashes vLLM on CPU, which walks through every loaded module."""
    script = "import sys, kvledger.adapters.vllm; print(sorted({m.partition('.')[0] for m in sys.modules}))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = result.stdout.splitlines()[-1]
    assert "'vllm'" in loaded
    assert "'numba'" not in loaded
    assert "'llvmlite'" not in loaded
