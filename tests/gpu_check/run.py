"""`make gpu-check`: look at everything that needs a CUDA device; what was found goes to build/gpu-check.json.

    python tests/gpu_check/run.py [--only race,poison] [--report build/gpu-check.json]

Runs from the checkout with any Python that has torch for CUDA, pytest and attrs; vLLM, compute-sanitizer and what else
a part needs is used where it is there, and the part says so where it is not. Exit codes: 0 where every part that could
run found what it should, or where there is no CUDA device and nothing was looked at, which is said; 1 where a part
failed; 2 where this Python cannot run any.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("torch", "pytest", "attrs")


def importable() -> None:
    """Let `kvledger`, and what the tests share, be imported from this checkout, whatever is installed."""
    package = ROOT / "build/import-root/kvledger"
    package.mkdir(parents=True, exist_ok=True)
    for source in ("lifecycle", "storage", "adapters", "adapters/public/__init__.py"):
        link = package / Path(source).name
        if not link.exists():
            link.symlink_to(ROOT / source)
    sys.path[:0] = [str(package.parent), str(ROOT / "tests")]


def driver() -> str:
    """The driver's version, as its own tool says it."""
    try:
        asked = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts; returns the exit code."""
    parser = argparse.ArgumentParser(description="Look at everything that needs a CUDA device.")
    parser.add_argument("--only", help="names of parts, separated by commas (default: all)")
    parser.add_argument("--report", type=Path, default=ROOT / "build/gpu-check.json", help="default: %(default)s")
    chosen = parser.parse_args(arguments)
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"gpu-check: {sys.executable} has no {', '.join(missing)}; name a Python that has: make gpu-check PYTHON=…"
        )
        return 2
    importable()
    import torch

    from gpu_check.machine import Machine
    from gpu_check.parts import PARTS
    from gpu_check.report import run_parts, summary

    names = [part.name for part in PARTS]
    wanted = chosen.only.split(",") if chosen.only else names
    if unknown := sorted(set(wanted) - set(names)):
        print(f"gpu-check: there is no part {', '.join(unknown)}; the parts are {', '.join(names)}")
        return 2
    if not torch.cuda.is_available():
        print(f"gpu-check: nothing measured, torch {torch.__version__} of {sys.executable} sees no CUDA device")
        return 0
    facts = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),  # noqa: UP017 -- any Python from 3.8 on says so
        "command": " ".join(sys.argv),
        "commit": subprocess.run(
            ("git", "-C", str(ROOT), "describe", "--always", "--dirty"), capture_output=True, text=True, check=False
        ).stdout.strip(),
        "device": torch.cuda.get_device_name(),
        "driver": driver(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
    }
    print("\n".join(f"{name}: {value}" for name, value in facts.items()))
    reports = run_parts([part for part in PARTS if part.name in wanted], Machine(torch.device("cuda", 0)))
    import attrs

    chosen.report.parent.mkdir(parents=True, exist_ok=True)
    written = {**facts, "parts": [attrs.asdict(report) for report in reports]}
    chosen.report.write_text(json.dumps(written, indent=2) + "\n")
    print(f"{summary(reports)}\nwritten to {chosen.report}")
    return 1 if any(report.outcome == "failed" for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
