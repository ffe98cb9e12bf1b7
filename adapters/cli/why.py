"""`kvledger why`: the chain of causes of one request, and a reason for every token that it missed or computed again."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import attrs

from kvledger.adapters.cli.finding import selected_one
from kvledger.adapters.cli.options import add_request, event_number
from kvledger.adapters.cli.output import Output
from kvledger.adapters.exit_codes import CommandFailed, ExitCode
from kvledger.adapters.logs.amounts import milliseconds, plural
from kvledger.adapters.logs.explanation import Cause, Chain
from kvledger.adapters.logs.reason_text import MEANINGS, reason_text
from kvledger.adapters.logs.selection import Selection
from kvledger.adapters.logs.stories import Told, tell
from kvledger.adapters.reasons import BY_DESIGN, LoadFate, Reason, Story, Sums

_MAX_LOOKUPS = 3
"""Of the different answers that a waiting request got in a row, people are told the last ones."""


def configure(parser: argparse.ArgumentParser) -> None:
    """What only this command has."""
    add_request(parser)
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--lookup", metavar="N", type=event_number, help="only the N-th lookup, counted from 1")
    one.add_argument("--at", metavar="EVENT", type=event_number, help="only what this event was part of")


def run(arguments: argparse.Namespace, output: Output) -> ExitCode:
    """Tell one request's story."""
    if arguments.request is None:
        raise CommandFailed("name a request: its id or a unique beginning; `kvledger show` lists them", ExitCode.USAGE)
    log, selection = selected_one(arguments, output)
    request_id = selection.request_id or ""
    told = tell(log, selection, request_id, output)
    lives = [Life(story, Chain(story, told, log.core, log.configuration).causes()) for story in told.stories]
    chosen = _chosen(lives, arguments, selection, output)
    if output.is_json:
        _show_json(output, chosen, told, log.configuration.chunk_size)
    else:
        is_whole = arguments.lookup is None and arguments.at is None
        _show_text(output, request_id, chosen, is_whole=is_whole)
    output.damage_of(log)
    if any(story.sums.differences() for story in told.stories):
        return ExitCode.DIVERGED
    return ExitCode.SOUND


@attrs.frozen
class Life:
    """One life of a request and its causes."""

    story: Story
    causes: list[Cause]


def _chosen(lives: Sequence[Life], arguments: argparse.Namespace, selection: Selection, output: Output) -> list[Life]:
    chosen = [
        attrs.evolve(life, causes=[cause for cause in life.causes if cause.last_sequence >= selection.first_sequence])
        for life in lives
    ]
    if arguments.lookup is not None:
        num_before = 0
        for life in lives:
            for cause in life.causes:
                if cause.what == "lookup":
                    num_before += cause.num_times
                    if num_before >= arguments.lookup:
                        return [attrs.evolve(life, causes=[cause])]
        raise CommandFailed(f"there were {plural(num_before, 'lookup')}, not {arguments.lookup}", ExitCode.USAGE)
    if arguments.at is not None:
        return [_at(chosen, arguments.at, output)]
    return chosen


def _at(lives: Sequence[Life], at: int, output: Output) -> Life:
    for life in lives:
        parts = [cause for cause in life.causes if cause.sequence <= at <= cause.last_sequence or at in cause.evidence]
        if parts:
            return attrs.evolve(life, causes=parts)
    before = [(life, cause) for life in lives for cause in life.causes if cause.last_sequence < at]
    if not before:
        raise CommandFailed(f"nothing had happened to the request by event {at}", ExitCode.USAGE)
    output.remark(f"event {at} is no part of the request's story; this is what happened to it before")
    life, cause = before[-1]
    return attrs.evolve(life, causes=[cause])


# --- for programs -------------------------------------------------------------------------------


def _show_json(output: Output, lives: Sequence[Life], told: Told, chunk_size: int) -> None:
    for life in lives:
        whose = {"request_id": life.story.request_id, "ordinal": life.story.ordinal}
        for cause in life.causes:
            fields = attrs.asdict(cause, filter=lambda field, _: field.name not in {"spans", "reasons"})
            output.record("cause", {**whose, **fields})
            for span in cause.spans:
                text = reason_text([span], told, chunk_size, cause.time_ns)
                output.record(
                    "reason",
                    {
                        **whose,
                        "of": cause.what,
                        "sequence": cause.sequence,
                        "reason": span.reason,
                        "first_token": span.first_token,
                        "num_tokens": span.num_tokens,
                        "evidence": span.evidence,
                        "text": text,
                    },
                )
        output.record("total", {**whose, **total(life.story.sums), "num_left_out": life.story.num_left_out})


def total(sums: Sums) -> dict[str, object]:
    """The sums as a JSON object; every reason and fate that counts something is in it."""
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
        "differences": sums.differences(),
    }


# --- for people ---------------------------------------------------------------------------------


def _show_text(output: Output, request_id: str, lives: Sequence[Life], *, is_whole: bool) -> None:
    output.line(request_id, style="bold")
    for number, life in enumerate(lives, 1):
        if len(lives) > 1:
            output.line(f"life {number} of {len(lives)}", style="bold")
        causes, num_hidden = _without_many_lookups(life.causes) if is_whole else (life.causes, 0)
        for cause in causes:
            output.line(f"{milliseconds(cause.time_ns):>12}  {_events(cause):>11}  {cause.text}")
            for reason in (*cause.reasons, *cause.notes):
                output.line(f"{'':>27}  {reason}", style="dim")
        if num_hidden:
            output.line(
                f"{plural(num_hidden, 'more lookup')} with other answers in between; --json has them", style="dim"
            )
        if life.story.num_left_out:
            output.line(f"{plural(life.story.num_left_out, 'entry')} of a very long story left out", style="dim")
        if is_whole:
            output.line()
            show_total(output, life.story.sums, life.story.sums.differences())


def _without_many_lookups(causes: Sequence[Cause]) -> tuple[list[Cause], int]:
    kept: list[Cause] = []
    num_hidden = 0
    for index, cause in enumerate(causes):
        following = causes[index + 1 : index + 1 + _MAX_LOOKUPS]
        if len(following) == _MAX_LOOKUPS and all(other.what == "lookup" for other in (cause, *following)):
            num_hidden += 1
        else:
            kept.append(cause)
    return kept, num_hidden


def _events(cause: Cause) -> str:
    return str(cause.sequence) if cause.sequence == cause.last_sequence else f"{cause.sequence}–{cause.last_sequence}"


def show_total(output: Output, sums: Sums, differences: Sequence[str]) -> None:
    """The table of tokens by reason, and whether it adds up."""
    misses = sums.misses()
    reasons = [reason for reason in Reason if misses[reason] or sums.recomputed[reason] or sums.computed_twice[reason]]
    reasons.sort(key=lambda reason: (reason in BY_DESIGN, -sums.recomputed[reason], -misses[reason]))
    columns = {"reason": "left", "left to compute": "right", "computed again": "right", "what it means": "left"}
    rows = [
        [
            reason.value,
            str(misses[reason]),
            str(sums.recomputed[reason] + sums.computed_twice[reason]),
            MEANINGS[reason],
        ]
        for reason in reasons
    ]
    again = sums.recomputed.total() + sums.computed_twice.total()
    rows.append(["all", str(misses.total()), str(again), ""])
    output.table(columns, rows)
    under_way = sums.to_load[LoadFate.UNDER_WAY]
    coming = f" + {under_way} still to be loaded" if under_way else ""
    coming += f" + {sums.num_elsewhere} from elsewhere" if sums.num_elsewhere else ""
    output.line(
        f"{plural(sums.num_needed, 'token')} at {plural(sums.num_admissions, 'admission')} = {sums.num_retained} from "
        f"vLLM's prefix cache + {sums.to_load[LoadFate.LOADED]} loaded{coming} + {misses.total()} left to compute"
    )
    for difference in differences:
        output.line(f"THIS DOES NOT ADD UP, which is a fault of kvledger: {difference}", style="bold red")
