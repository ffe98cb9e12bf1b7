"""Writes the sample pages in `docs/samples`: an incident, and the demo.

make demo && .venv/bin/python docs/pictures/samples.py build/demo/logs
"""

from __future__ import annotations

import contextlib
import os
import runpy
import shutil
import sys
import tempfile
from pathlib import Path

from kvledger.adapters.tools.cli.main import main

DOCS = Path(__file__).resolve().parents[1]
SAMPLES = DOCS / "samples"


def write(demo_logs: Path) -> None:
    """Write both pages. The logs get short paths, because a page names them."""
    demo_logs = demo_logs.resolve()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        sys.argv = ["cached_answer.py", "incident"]
        runpy.run_path(str(DOCS / "examples/cached_answer.py"), run_name="__main__")
        shutil.copytree(demo_logs, "logs")
        for log, name in (("incident", "cached-answer"), ("logs", "preemptions")):
            if main(["export", log, "--html", "--force", "-o", str(SAMPLES / f"{name}.html")]):
                sys.exit(os.EX_SOFTWARE)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
