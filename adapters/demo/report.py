"""What the demo found, as one JSON object, and what would make it worthless."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import attrs

from kvledger.adapters.demo.workload import Workload
from kvledger.adapters.logs.log import open_log
from kvledger.lifecycle import Figures, Projections
from kvledger.lifecycle import events as e


@attrs.frozen
class LoggedRun:
    """What the log says about a run."""

    figures: Figures
    request_to_show: str
    """The preempted request that had most to lose, or "" where none was preempted."""

    @classmethod
    def read(cls, log_path: Path) -> LoggedRun:
        """Fold the log."""
        log = open_log(log_path)
        projections = Projections(log.core, log.configuration)
        most_settled, request_id = -1, ""
        for sequence, event in log.trusted_events():
            projections.fold(event, sequence)
            if isinstance(event, e.RequestPreempted) and event.num_settled_tokens > most_settled:
                most_settled, request_id = event.num_settled_tokens, event.request_id
        return cls(projections.totals.figures, request_id)


@attrs.frozen
class EngineFigures:
    """One run as the meter saw it, independently of any log."""

    num_preemptions: int
    num_tokens_lost: int
    num_tokens_recomputed: int
    duration_s: float

    @classmethod
    def from_result(cls, result: dict[str, Any]) -> EngineFigures:
        """The figures of an engine's result message."""
        return cls(**{field.name: result[field.name] for field in attrs.fields(cls)})


@attrs.frozen
class Report:
    """`report.json`. Token counts named by the log stand on the top level, measured ones with their runs."""

    workload: Workload
    vllm_version: str
    log_path: str
    outputs_equal: bool
    verify_exit_code: int
    logged: Figures
    with_connector: EngineFigures
    without_connector: EngineFigures
    duration_s: float

    def failures(self) -> list[str]:
        """Why this run shows nothing, or shows something wrong; empty when all is well."""
        logged, measured = self.logged, self.with_connector
        found = []
        if not logged.num_preemptions:
            found.append("nothing was preempted: the pool of KV blocks was large enough for all requests")
        elif not logged.num_tokens_recovered:
            found.append(f"nothing was recovered after {logged.num_preemptions} preemptions; `kvledger show` says why")
        if not self.outputs_equal:
            found.append("the outputs differ from those of the run without a connector: wrong KV was read")
        if self.verify_exit_code:
            found.append(f"`kvledger verify` ended with {self.verify_exit_code}: see its words above")
        for name in ("num_preemptions", "num_tokens_recomputed"):
            in_log, seen = getattr(logged, name), getattr(measured, name)
            if in_log != seen:
                found.append(f"the log counts {name} {in_log}, vLLM's scheduler was seen to do {seen}")
        return found

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        logged = attrs.asdict(self.logged)
        leading = (
            "num_preemptions",
            "num_tokens_recovered",
            "num_tokens_retained",
            "num_tokens_recomputed",
        )
        return {
            "failures": self.failures(),
            "kvledger_version": metadata.version("kvledger"),
            "vllm_version": self.vllm_version,
            "seed": self.workload.seed,
            **{name: logged[name] for name in leading},
            "outputs_equal": self.outputs_equal,
            "verify_exit_code": self.verify_exit_code,
            "log_path": self.log_path,
            "duration_s": self.duration_s,
            "with_connector": attrs.asdict(self.with_connector),
            "without_connector": attrs.asdict(self.without_connector),
            "logged": logged,
            "workload": attrs.asdict(self.workload),
        }
