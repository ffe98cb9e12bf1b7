"""`kvledger show --at`: print the state of a log, or of one request, at one moment."""

from __future__ import annotations

from typing import Any

import attrs

from kvledger.adapters.figures import Totals
from kvledger.adapters.tools.cli.finding import lives_in
from kvledger.adapters.tools.cli.output import Output
from kvledger.adapters.tools.exit_codes import ExitCode
from kvledger.adapters.tools.logs.coverage import checked
from kvledger.adapters.tools.logs.describe import plain
from kvledger.adapters.tools.logs.facts import UNKNOWN_TOTALS
from kvledger.adapters.tools.logs.log import StoredLog
from kvledger.adapters.tools.logs.selection import Selection
from kvledger.adapters.units import plural
from kvledger.lifecycle import Projections, RequestRecord, TrustRegion
from kvledger.lifecycle.audit import Audit

_COUNTS = ("generation", "computed", "tokens", "preempted", "blocks", "keys", "offered")


def show_state(log: StoredLog, selection: Selection, output: Output) -> ExitCode:
    """Print the state of the log, or of the selected request, after the last selected event."""
    audit = Audit(log.core, log.configuration, checkers=(), start=log.start())
    totals = log.totals(audit.projections)
    with output.progress(log, "folding"):
        audit.run_frames(log.trusted_frames(), at=selection.last_sequence)
    output.damage_of(log)
    for remark in (*log.start_remarks, *log.other_code_remarks):
        output.remark(remark)
    if not audit.num_events:
        reason = checked(log, selection, None, is_present=True).why_nothing or "no event can be folded"
        output.nothing(log.path, f"{log.path}: nothing could be shown: {reason}")
        return ExitCode.DAMAGED if log.damage else ExitCode.NOTHING_CHECKED
    if log.start_sequence:
        output.remark(f"the state was folded from a snapshot and the events from event {log.start_sequence + 1} on")
    elif log.begins_late:
        output.remark(
            f"the log begins with event {log.first_sequence}; the events before are missing, so the log's state is not "
            "known"
        )
    is_short = selection.last_sequence is not None and audit.last_sequence < selection.last_sequence
    if is_short:
        output.remark(f"the log can be folded only to event {audit.last_sequence}, not to {selection.last_sequence}")
    _show(output, audit.projections, totals, audit.last_sequence, selection.request_id)
    unfoldable = audit.judgement().unfoldable
    if unfoldable is not None:
        output.remark(str(unfoldable))
        return ExitCode.DIVERGED
    if is_short and log.damage:
        return ExitCode.DAMAGED
    return output.coverage_of(log, selection, is_found=lives_in(log, selection, output))


def _show(output: Output, projections: Projections, totals: Totals, sequence: int, request_id: str | None) -> None:
    records = [record for record in projections.tracker if request_id in {None, record.request_id}]
    requests = [_request_fields(record, projections) for record in records]
    if output.is_json:
        if request_id is None:
            counted = None if totals.complete_figures is None else plain(totals.state)
            state = {"sequence": sequence, "projections": plain(projections.states()), "totals": counted}
            output.record("state", state)
        else:
            for request in requests:
                output.record("request_state", {"sequence": sequence, **request})
        return
    output.line(f"state after event {sequence}", style="bold")
    if requests:
        left, right = dict.fromkeys(("request", "state"), "left"), dict.fromkeys(_COUNTS, "right")
        output.table({**left, **right, "jobs": "left"}, [_request_row(request) for request in requests])
    else:
        output.line("no request is known" if request_id is None else f"{request_id} is not known at that moment")
    if request_id is None:
        _show_cache(output, projections)
        _show_totals(output, totals)


def _request_fields(record: RequestRecord, projections: Projections) -> dict[str, Any]:
    request_id = record.request_id
    pending = record.answer
    return {
        "request_id": request_id,
        "ordinal": record.ordinal,
        "state": record.path,
        "state_since_ns": record.state_since_ns,
        "generation": record.generation,
        "num_computed_tokens": projections.tracker.num_computed_tokens(record),
        "num_tokens": max(record.num_tokens, projections.tracker.num_computed_tokens(record)),
        "num_prompt_tokens": record.num_prompt_tokens,
        "num_preemptions": record.num_preemptions,
        "quarantined": record.trust is TrustRegion.QUARANTINED,
        "block_ids": list(record.block_ids or ()),
        "lost_block_ids": list(record.lost_block_ids or ()),
        "chunk_keys": [key.hex() for key in record.keys],
        "num_chunks_handled": record.num_chunks_handled,
        "pending_answer": None if pending is None else plain(pending),
        "jobs": [
            {"job_id": job.job_id, "kind": job.kind.value, "block_ids": list(job.block_ids), "slots": list(job.slots)}
            for job in projections.jobs
            if job.ordinal == record.ordinal
        ],
    }


def _request_row(request: dict[str, Any]) -> list[str]:
    pending, is_quarantined = request["pending_answer"], request["quarantined"]
    counts = (
        request["generation"],
        request["num_computed_tokens"],
        request["num_tokens"],
        request["num_preemptions"],
        len(request["block_ids"]),
        len(request["chunk_keys"]),
        "" if pending is None else pending["num_external_tokens"],
    )
    jobs = ", ".join(f"{job['kind']} {job['job_id']}" for job in request["jobs"])
    state = f"{request['state']}{' (quarantined)' if is_quarantined else ''}"
    return [request["request_id"], state, *map(str, counts), jobs]


def _show_cache(output: Output, projections: Projections) -> None:
    slots = projections.slots
    output.field("host pool", f"{slots.num_slots - slots.num_free} of {slots.num_slots} slots in use")
    output.field("chunks", f"{len(projections.pool)} can be loaded, cache resets so far: {projections.jobs.epoch}")
    output.field("jobs", f"{plural(len(projections.jobs), 'job')} in flight")
    for job in projections.jobs:
        output.line(f"  {job.kind} {job.job_id} of {job.request_id}, {plural(len(job.block_ids), 'block')}")


def _show_totals(output: Output, totals: Totals) -> None:
    figures = totals.complete_figures
    if figures is None:
        output.field("totals", UNKNOWN_TOTALS)
        return
    counted = {name: value for name, value in attrs.asdict(figures).items() if value}
    output.field("totals", ", ".join(f"{name} {value}" for name, value in counted.items()) or "nothing yet")
