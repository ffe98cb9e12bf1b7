"""Reasons in plain words: what each means, and what the events behind it were."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvledger.adapters.logs.amounts import duration, plural, ranges
from kvledger.adapters.logs.describe import words_of_core
from kvledger.adapters.logs.stories import Told
from kvledger.adapters.reasons import BY_DESIGN, ChunkFact, ChunkStatus, Reason, Span
from kvledger.lifecycle import events as e

MEANINGS: dict[Reason, str] = {
    Reason.NEW: "nobody had computed them before",
    Reason.LAST_TOKEN: "the last known token is always computed, because the next one is sampled from it",
    Reason.PARTIAL_CHUNK: "behind the last whole chunk, so nothing is saved under a key",
    Reason.UNSAVED: "no save had been issued: they had not settled by then",
    Reason.SAVING: "their save was still under way",
    Reason.DEFERRAL_EXHAUSTED: "their save was still under way, after the scheduler had waited as often as is allowed",
    Reason.DECLINED: "not saved, because the host pool had no room or a load had failed into their blocks",
    Reason.SAVE_FAILED: "their save failed",
    Reason.EVICTED: "saved and evicted",
    Reason.TAINTED: "tainted: a load of them had failed",
    Reason.RESET: "lost to a cache reset",
    Reason.STALE: "computed before a cache reset and not saved by then",
    Reason.BEHIND_GAP: "saved, but behind a chunk that was not there; a prefix ends at the first that is missing",
    Reason.WINDOW: "saved, but not what a sliding window sees at any later boundary",
    Reason.LIMITED: "saved, but a policy allows no more",
    Reason.LOAD_FAILED: "their load failed, or the load before had failed and the request had to compute first",
    Reason.QUARANTINED: "the request was quarantined: it got no help from the cache",
    Reason.UNALIGNED: "saved, but the local prefix did not end at a block",
    Reason.RIVAL_LOAD: "saved, but another request's load was under way, and there is one at a time",
    Reason.NO_KEY: "the keys of their chunks were not known",
    Reason.RECORDED: "not offered by the recorded connector; why is not in the log",
    Reason.NOT_TAKEN_UP: "offered, and not taken up by the scheduler",
    Reason.NOT_DELIVERED: "taken up, and not loaded, because a rule was broken",
    Reason.HOOK_FAILED: "no lookup was recorded, because a hook failed",
    Reason.WITHHELD: "withheld from the scheduler, because the event log could not be written",
    Reason.NO_LOOKUP: "no lookup was recorded",
    Reason.ROLLED_BACK: "taken back by the scheduler",
    Reason.UNKNOWN: "the log does not tell",
}


def told_together(spans: Sequence[Span]) -> Iterator[list[Span]]:
    """Neighbours with one reason that one and the same request or event led to."""
    group: list[Span] = []
    for span in spans:
        if group and (group[-1].end_token != span.first_token or _whose(group[-1]) != _whose(span)):
            yield group
            group = []
        group.append(span)
    if group:
        yield group


def _whose(span: Span) -> tuple[object, ...]:
    fact = span.fact
    if span.reason is Reason.BEHIND_GAP or span.reason in BY_DESIGN:
        return (span.reason,)
    if fact is None:
        return (span.reason, span.evidence)
    return (span.reason, fact.status, fact.request_id, fact.cause, fact.detail, fact.earlier is None)


def reason_text(spans: Sequence[Span], told: Told, chunk_size: int, before_ns: int | None) -> str:
    """Why these tokens, told together, were left to compute. `before_ns` is the moment at which they were missed."""
    first = spans[0]
    where = _where(first.first_token, spans[-1].end_token, None if first.reason in _WITHOUT_CHUNKS else chunk_size)
    facts = [span.fact for span in spans if span.fact is not None]
    if facts and first.reason is not Reason.BEHIND_GAP:
        return f"{where}: {_fact_text(first.reason, facts, told, before_ns)}"
    proof = first.evidence[:1]
    template = _WITH_PROOF.get(first.reason) if proof else None
    if template is None:
        return f"{where}: {MEANINGS[first.reason]}"
    when = _when(proof, told, before_ns)
    return f"{where}: {template.format(when=when, what=_what(proof[0], told))}"


_WITH_PROOF: dict[Reason, str] = {
    Reason.LOAD_FAILED: "a load of the request failed{when}{what}",
    Reason.QUARANTINED: "the request was quarantined{when}{what}",
    Reason.STALE: "computed before the cache reset{when}, and not saved by then",
    Reason.UNSAVED: "computed before the preemption{when}, and no save had been issued",
    Reason.NOT_DELIVERED: "taken up, and not loaded{when}{what}",
    Reason.ROLLED_BACK: "taken back by the scheduler{when}",
    Reason.HOOK_FAILED: "no lookup was recorded, because a hook failed{when}{what}",
    Reason.NOT_TAKEN_UP: "offered, and not taken up by the scheduler{when}",
    Reason.WITHHELD: "withheld from the scheduler{when}, because the event log could not be written",
    Reason.EVICTED: "saved and evicted{when}",
    Reason.TAINTED: "tainted by a failed load{when}",
    Reason.RESET: "lost to the cache reset{when}",
}


def _where(first_token: int, end_token: int, chunk_size: int | None) -> str:
    tokens = f"token {first_token}" if end_token == first_token + 1 else f"tokens {first_token}–{end_token - 1}"
    if chunk_size is None:
        return tokens
    chunks = range(first_token // chunk_size, -(-end_token // chunk_size))
    return f"{tokens} (chunk{'' if len(chunks) == 1 else 's'} {ranges(chunks)})"


_WITHOUT_CHUNKS = BY_DESIGN | {Reason.RECORDED}
_WHY_DECLINED = {
    e.POOL_FULL: "the host pool had no room",
    e.UNFILLED: "a load had failed into blocks that it relies on",
}


def _fact_text(reason: Reason, facts: Sequence[ChunkFact], told: Told, before_ns: int | None) -> str:
    fact = facts[0]
    when = _when([one.sequence for one in facts], told, before_ns)
    who = _who(fact, told)
    by = f" by {who}"
    if reason is Reason.EVICTED:
        text = f"evicted for a save of {who}{when}"
    elif reason is Reason.DECLINED:
        text = f"not saved{by}{when}, because {_WHY_DECLINED.get(fact.detail, fact.detail)}"
    elif reason is Reason.SAVE_FAILED:
        text = f"save {fact.job_id}{by} failed{when}: {fact.detail}"
    elif reason in {Reason.SAVING, Reason.DEFERRAL_EXHAUSTED}:
        text = f"save {fact.job_id}{by}, issued{when}, was still under way"
        if reason is Reason.DEFERRAL_EXHAUSTED:
            text += ", after the scheduler had waited as often as is allowed"
    elif reason is Reason.UNSAVED:
        text = f"known to {who}{when}, and no save had been issued"
    else:
        text = f"{MEANINGS[reason]}{when}"
    return text + _earlier_text(fact.earlier, told, before_ns)


def _earlier_text(fact: ChunkFact | None, told: Told, before_ns: int | None) -> str:
    if fact is None:
        return ""
    when = _when([fact.sequence], told, before_ns)
    if fact.status is ChunkStatus.SAVED:
        return f"; it had been saved by {_who(fact, told)}{when}"
    if fact.status is ChunkStatus.SAVING:
        return f"; save {fact.job_id} of {_who(fact, told)} was under way{when}"
    by = f" for a save of {_who(fact, told)}" if fact.status is ChunkStatus.EVICTED else ""
    return f"; before, it had been {fact.status}{by}{when}" + _earlier_text(fact.earlier, told, before_ns)


def _who(fact: ChunkFact, told: Told) -> str:
    is_own = any((story.request_id, story.ordinal) == (fact.request_id, fact.ordinal) for story in told.stories)
    return "the request itself" if is_own else f"request {fact.request_id or '(not recorded)'}"


def _when(sequences: Sequence[int], told: Told, before_ns: int | None) -> str:
    numbers = sorted({number for number in sequences if number})
    if not numbers:
        return ""
    at = f" at event {numbers[0]}" if len(numbers) == 1 else f" at events {ranges(numbers)}"
    time_ns = told.time_ns(numbers[-1])
    if time_ns is None or before_ns is None or time_ns >= before_ns:
        return at
    return f"{at}, {duration(before_ns - time_ns)} before"


def _what(sequence: int, told: Told) -> str:
    """What the event was, where its words say more than that it happened."""
    witness = told.witnesses.get(sequence)
    event = None if witness is None else witness.event
    if isinstance(event, e.LoadFailed | e.RequestQuarantined | e.InvariantViolated | e.HookFailed):
        return f" ({words_of_core(event)})"
    return ""


def count_by_reason(spans: Sequence[Span]) -> str:
    """`24 evicted, 8 declined`."""
    counts: dict[Reason, int] = {}
    for span in spans:
        counts[span.reason] = counts.get(span.reason, 0) + span.num_tokens
    return ", ".join(f"{plural(count, 'token')} {reason}" for reason, count in counts.items())
