"""`kvledger why`: print what happened to one request, and a reason for every token that it missed or computed again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import msgspec

from kvledger.adapters.tools.cli.finding import selected_one
from kvledger.adapters.tools.cli.options import NO_EXTENSIONS, Extending, Reading, may_be_request
from kvledger.adapters.tools.cli.output import Output, Written, show_title
from kvledger.adapters.tools.exit_codes import CommandFailed, ExitCode
from kvledger.adapters.tools.logs.clock import Clock
from kvledger.adapters.tools.logs.describe import spent_text
from kvledger.adapters.tools.logs.explanation import (
    Cause,
    balance,
    causes_of,
    duplicated_text,
    folded,
    reason_text,
    sums_by_reason,
)
from kvledger.adapters.tools.logs.histories import Histories, read_histories
from kvledger.adapters.tools.logs.log import StoredLog
from kvledger.adapters.tools.reasons import LoadFate, RequestHistory, Sums, advice
from kvledger.adapters.units import event_range, milliseconds
from kvledger.lifecycle import events as e
from kvledger.lifecycle.reader import Spent

_ARRIVED = e.RequestArrived.id
_GIVE_LOG = "give the LOG before the REQUEST, or set KVLEDGER_LOG (`kvledger ls` lists the logs of a directory)"
_FOR_PEOPLE = frozenset({"spans", "reasons", "words", "held"})
"""Fields of a cause that its JSON object does not have."""
_Chain = tuple[RequestHistory, Sequence[Cause]]
"""One life, and its causes."""


def run(reading: Reading, *, extending: Extending = NO_EXTENSIONS, output: Written) -> ExitCode:
    """Explain one request."""
    if reading.request is None:
        if may_be_request(reading.log):
            raise CommandFailed(f"{reading.log} does not exist; if you mean a REQUEST, {_GIVE_LOG}")
        raise CommandFailed("REQUEST is missing; give a request id or a unique part of one (`kvledger show` lists ids)")
    log, selection = selected_one(reading, output, extending.core())
    histories = read_histories(log, selection, selection.request_id or "", output)
    chains = [
        (
            history,
            [cause for cause in causes_of(history, histories, log) if cause.last_sequence >= selection.first_sequence],
        )
        for history in histories.of_lives
    ]
    if output.is_json:
        _show_json(output, chains, histories, log)
    else:
        arrived_ns = next((causes[0].time_ns for _, causes in chains if causes), 0)
        clock = Clock(log.header)
        show_title(output, selection.request_id or "", clock, arrived_ns)
        _show_text(output, chains, clock, log)
    output.damage_of(log)
    return output.coverage_of(log, selection, is_found=any(causes for _, causes in chains))


# --- for programs -------------------------------------------------------------------------------


def _show_json(output: Output, chains: Sequence[_Chain], histories: Histories, log: StoredLog) -> None:
    clock = Clock(log.header)
    for history, causes in chains:
        of_life = {"request_id": history.request_id, "ordinal": history.ordinal}
        for cause in causes:
            fields = attrs.asdict(cause, filter=lambda field, _: field.name not in _FOR_PEOPLE)
            times = {"time_unix_ns": clock.unix_ns(cause.time_ns), "until_unix_ns": clock.unix_ns(cause.until_ns)}
            output.record("cause", {**of_life, **fields, **times})
            for span in cause.spans:
                fields = {
                    "of": cause.what,
                    "sequence": cause.sequence,
                    "reason": span.reason,
                    "first_token": span.first_token,
                    "num_tokens": span.num_tokens,
                    "evidence": span.evidence,
                    "text": reason_text([span], histories, log.configuration.chunk_size, cause.time_ns),
                }
                output.record("reason", {**of_life, **fields})
        spent: dict[str, object] = dict.fromkeys(Spent.__struct_fields__)
        if history.spent is not None:
            spent = msgspec.structs.asdict(history.spent)
        fields = {**of_life, **spent, **total(history.sums), "num_left_out": history.num_left_out}
        output.record("total", {**fields, "advice": _advice(history, log)})


def _advice(history: RequestHistory, log: StoredLog) -> dict[str, str]:
    return {} if log.decides_elsewhere else advice(history.sums, log.configuration, history.spent)


def total(sums: Sums) -> dict[str, object]:
    """Return the sums as a JSON object. It has only the reasons and outcomes that have tokens."""
    return {
        "num_admissions": sums.num_admissions,
        "num_tokens_needed": sums.num_needed,
        "num_tokens_retained": sums.num_retained,
        "num_tokens_elsewhere": sums.num_elsewhere,
        "num_tokens_loaded": sums.to_load[LoadFate.LOADED],
        "num_tokens_missed": sums.num_missed(),
        "missed": +sums.misses(),
        "num_tokens_recomputed": sums.num_recomputed,
        "recomputed": +sums.recomputed,
        "computed_twice": +sums.computed_twice,
        "num_tokens_offered": sums.num_offered,
        "offered": +sums.offered,
        "to_load": +sums.to_load,
        "num_tokens_duplicated": sums.num_duplicated,
        "duplicated": +sums.duplicated,
    }


# --- for people ---------------------------------------------------------------------------------


def _show_text(output: Output, chains: Sequence[_Chain], clock: Clock, log: StoredLog) -> None:
    for number, (history, every_cause) in enumerate(chains, 1):
        causes = folded(every_cause)
        if len(chains) > 1:
            output.line(f"life {number} of {len(chains)}", style="bold")
        if causes and history.spent is not None:
            output.line(spent_text(history.spent, history.num_preemptions, has_finished=history.has_finished))
        events = [event_range(cause.sequence, cause.last_sequence) for cause in causes]
        wide = max(map(len, events), default=0)
        for cause, place in zip(causes, events, strict=True):
            if day := clock.new_day(cause.time_ns):
                output.line(day, style="dim")
            at = f"{milliseconds(cause.time_ns):>10}  {place:>{wide}}  "
            at = f"{clock.time_of_day(cause.time_ns)}  {at}" if clock.is_known else at
            output.line(f"{at}{cause.text}", indent=len(at))
            for reason in (*cause.reasons, *cause.notes):
                output.line(f"{'':{len(at)}}  {reason}", style="dim")
        if history.num_left_out:
            output.line(f"{history.num_left_out} more entries about this request are left out", style="dim")
        output.line()
        if causes and causes[0].what == _ARRIVED and not (history.lookups or history.admissions):
            output.line("never scheduled: vLLM did not look it up and gave it no blocks")
        else:
            show_total(output, history.sums)
        show_advice(output, _advice(history, log))


def show_advice(output: Output, texts: Mapping[str, str]) -> None:
    """Print what to change, one line for each reason. Print nothing if there is no advice."""
    if texts:
        output.line()
        output.line("possible changes", style="bold")
    for reason, text in texts.items():
        output.line(f"  {reason}: {text}", indent=4)


def show_total(output: Output, sums: Sums) -> None:
    """Print the number of tokens for each reason, and an equation that shows that the tokens add up."""
    columns = {"reason": "left", "left to compute": "right", "computed again": "right", "meaning": "left"}
    found = sums_by_reason(sums)
    rows = [[reason.value, str(missed), str(again), reason.meaning] for reason, missed, again in found]
    rows.append(["all", str(sum(missed for _, missed, _ in found)), str(sum(again for *_, again in found)), ""])
    output.table(columns, rows)
    output.line(balance(sums))
    if sums.num_duplicated:
        output.line(duplicated_text(sums))
