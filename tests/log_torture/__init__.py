"""What logs are tortured with: a writer that says what it was promised, kill points, a disk that loses power.

It knows `kvledger.storage.events` only. `run.py` kills thousands of writers (`make torture`).
"""

from __future__ import annotations

from log_torture.kill_points import KillPoint, run_until_killed
from log_torture.stored import read_to_end, reopened
from log_torture.verdict import check_log
from log_torture.writer import Plan, payload_of, write

__all__ = ["KillPoint", "Plan", "check_log", "payload_of", "read_to_end", "reopened", "run_until_killed", "write"]
