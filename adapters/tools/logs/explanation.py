"""Explains in English why the tokens of a request were computed: a list of causes in the order of the log.

A cause is something that happened to the request, such as a lookup. It has the reasons why tokens were left to compute.
Statements that the log does not prove are marked "inferred".
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence

import attrs

from kvledger.adapters.tools.logs.describe import (
    WHY_DECLINED,
    describe,
    describe_core_event,
    lookups_in_a_row,
    without_numbers,
)
from kvledger.adapters.tools.logs.histories import Histories, NamedEvent
from kvledger.adapters.tools.logs.log import StoredLog
from kvledger.adapters.tools.reasons import (
    BY_DESIGN,
    Admission,
    ChunkFact,
    ChunkStatus,
    LoadFate,
    Lookup,
    Reason,
    Recomputation,
    RequestHistory,
    SharedLoad,
    Span,
    Sums,
)
from kvledger.adapters.tools.reasons.spans import joined
from kvledger.adapters.units import duration, milliseconds, plural, ranges
from kvledger.lifecycle import Core, LedgerConfiguration, suppressed
from kvledger.lifecycle import events as e

_PROVEN = frozenset(
    {
        Reason.UNSAVED,
        Reason.EVICTED,
        Reason.TAINTED,
        Reason.RESET,
        Reason.STALE,
        Reason.LOAD_FAILED,
        Reason.QUARANTINED,
        Reason.NOT_CLAIMED,
        Reason.NOT_DELIVERED,
        Reason.HOOK_FAILED,
        Reason.WITHHELD,
        Reason.ROLLED_BACK,
    }
)
"""Reasons for which the log has other evidence than the lookup itself."""
_WITHOUT_CHUNKS = BY_DESIGN | {Reason.RECORDED}
_SINCE_LOOKUP = frozenset({Reason.LOAD_FAILED, Reason.NOT_DELIVERED, Reason.ROLLED_BACK, Reason.UNKNOWN})
"""Reasons that arise after a lookup."""
_MAX_LOOKUPS = 3
"""Maximum number of similar lookups in a row that are listed one by one. Their answers differ only in numbers."""
_MAX_PREFIXES = 3
"""Maximum number of duplicated prefixes that the text names; --json has all of them."""
_COMPUTED_AGAIN = {"recomputed": "", "computed_twice": " after a rollback"}
_ONLY_IF_ANY = frozenset({"still to be loaded", "from elsewhere"})
_OF_RECORDED = {
    Reason.COMPUTING: "known to {owner}{when}; that request was still computing these tokens",
    Reason.NEVER_GIVEN: "known to {owner}{when}, but never given to the connector's workers to save",
    Reason.EVICTED_UNSAVED: (
        "known to {owner}{when}, never given to the connector's workers to save, and gone from vLLM's prefix cache"
    ),
    Reason.RESET_UNSAVED: (
        "known to {owner}{when}, never given to the connector's workers to save, and lost to a reset of vLLM's cache"
    ),
    Reason.NEVER_OFFERED: "saved by {owner}{when}, but the recorded connector never offered them to any request",
    Reason.NOT_OFFERED: (
        "offered to {owner}{when}, but not this time; the log does not contain the connector's evictions"
    ),
}
"""Reason → text, for chunks in a recorder's log."""


@attrs.define
class Cause:
    """One cause in the explanation of a life. Times in nanoseconds since the log was opened."""

    what: str
    """`lookup`, `admission`, `recomputed`, `computed_twice`, or the id of an event."""
    sequence: int
    last_sequence: int
    time_ns: int
    text: str
    words: str = ""
    """Text of a lookup. Repetitions, durations, and the load for which the lookup waits are left out."""
    num_times: int = 1
    until_ns: int = attrs.field(default=attrs.Factory(lambda cause: cause.time_ns, takes_self=True))
    """Time of the last lookup if the cause combines several lookups; else `time_ns`."""
    waited_ns: int = 0
    """Time from the request's arrival to its first lookup, if the cause is this lookup; else 0."""
    spans: tuple[Span, ...] = ()
    """The tokens that had to be computed, with the reasons."""
    reasons: list[str] = attrs.field(factory=list)
    """Reasons in words, one line each. Reasons that an earlier cause shows are left out."""
    evidence: tuple[int, ...] = ()
    num_blocks_held: int = 0
    """Blocks of vLLM's KV cache that all requests together held at `time_ns`; 0 if unknown."""
    held: str = ""
    """`num_blocks_held` in words; empty unless this is the life's first lookup, and it was late or repeated."""
    notes: list[str] = attrs.field(factory=list)
    """Lines that extensions add."""


def causes_of(history: RequestHistory, histories: Histories, log: StoredLog) -> list[Cause]:
    """Return the causes of one life, in the order of the log.

    Args:
        history: the history of that life.
        histories: the histories of all lives of the request id, with the events that these histories name.
        log: the log from which the histories were read.
    """
    return _Chain(history, histories, log.core, log.configuration, log.num_device_blocks).causes()


def folded(causes: Sequence[Cause]) -> list[Cause]:
    """Combine causes that repeat each other, so that people can read the list.

    A broken rule and the quarantine because of that rule become one cause. More than `_MAX_LOOKUPS` lookups whose
    answers differ only in numbers become one cause if nothing but lookups lies between them.
    """
    result: list[Cause] = []
    for cause in _fewer_lookups(causes):
        last = result[-1] if result else None
        if (
            last is not None
            and (last.what, cause.what) == (e.InvariantViolated.id, e.RequestQuarantined.id)
            and last.evidence == cause.evidence[:1]
        ):
            text = f"{last.text} (event {cause.evidence[0]}); the cache is disabled for this request"
            result[-1] = attrs.evolve(last, text=text, last_sequence=cause.sequence, notes=last.notes + cause.notes)
        else:
            result.append(cause)
    return result


def _fewer_lookups(causes: Sequence[Cause]) -> Iterator[Cause]:
    for is_lookup, run in itertools.groupby(causes, key=lambda cause: cause.what == "lookup"):
        if not is_lookup:
            yield from run
            continue
        alike: dict[str, list[Cause]] = {}
        for cause in run:
            alike.setdefault(without_numbers(cause.words), []).append(cause)
        groups = (same if len(same) <= _MAX_LOOKUPS else [_one_lookup(same)] for same in alike.values())
        yield from sorted(itertools.chain.from_iterable(groups), key=lambda cause: cause.sequence)


def _one_lookup(same: Sequence[Cause]) -> Cause:
    first, last = same[0], same[-1]
    num_times = sum(cause.num_times for cause in same)
    parts = zip(re.split(r"(\d+)", first.words), re.split(r"(\d+)", last.words), strict=True)
    text = "".join(before if before == after else f"{before} → {after}" for before, after in parts)
    text += lookups_in_a_row(num_times, last.until_ns - first.time_ns, first.waited_ns) + first.held
    if last.reasons:
        text += f"; reasons of the lookups from event {last.sequence} ({milliseconds(last.time_ns)} ms) on:"
    return attrs.evolve(
        last,
        sequence=first.sequence,
        time_ns=first.time_ns,
        text=text,
        num_times=num_times,
        num_blocks_held=first.num_blocks_held,
    )


def sums_by_reason(sums: Sums) -> list[tuple[Reason, int, int]]:
    """Return rows of (reason, missed tokens, tokens computed again).

    The rows are sorted by tokens computed again, the largest number first. Rows with a reason in `BY_DESIGN` come last.
    """
    missed, again = sums.misses(), sums.recomputed + sums.computed_twice
    found = [(reason, missed[reason], again[reason]) for reason in Reason if missed[reason] or again[reason]]
    return sorted(found, key=lambda row: (row[0] in BY_DESIGN, -row[2], -row[1]))


def balance(sums: Sums) -> str:
    """Return an equation: the number of needed tokens is the sum of the tokens from each source."""
    parts = {
        "from vLLM's prefix cache": sums.num_retained,
        "loaded": sums.to_load[LoadFate.LOADED],
        "still to be loaded": sums.to_load[LoadFate.UNDER_WAY],
        "from elsewhere": sums.num_elsewhere,
        "left to compute": sums.misses().total(),
    }
    shown = [f"{count:,} {name}" for name, count in parts.items() if count or name not in _ONLY_IF_ANY]
    return f"{sums.num_needed:,} tokens at {plural(sums.num_admissions, 'admission')} = {' + '.join(shown)}"


def duplicated_text(sums: Sums) -> str:
    """Describe how many tokens were duplicated (loaded by two loads at the same time), and of which prefixes."""
    prefixes = sums.duplicated.most_common(_MAX_PREFIXES)
    named = [f"{plural(count, 'token')} of the prefix that ends with chunk {key}" for key, count in prefixes]
    num_others = len(sums.duplicated) - len(prefixes)
    others = [f"{num_others} more"] if num_others else []
    return f"duplicated, because another load in flight loaded the same tokens: {', '.join((*named, *others))}"


@attrs.frozen
class _Chain:
    """Computes the causes of one life."""

    history: RequestHistory
    histories: Histories
    core: Core
    configuration: LedgerConfiguration
    num_device_blocks: int

    def causes(self) -> list[Cause]:
        """Return all causes, in the order of the log."""
        causes = [
            *self._happenings(),
            *(self._lookup(lookup, is_first=not place) for place, lookup in enumerate(self.history.lookups)),
            *map(self._admission, self.history.admissions),
        ]
        causes.sort(key=lambda cause: cause.last_sequence)
        self._add_notes(causes)
        # A cause without text repeats another cause.
        causes = [cause for cause in causes if cause.text or cause.notes]
        return _merged(causes, [self._recomputed(again) for again in self.history.recomputations])

    def _add_notes(self, causes: Sequence[Cause]) -> None:
        """Add the notes of extensions to each cause."""
        known: list[tuple[int, e.Event]] = []
        for cause in causes:
            named = self.histories.events.get(cause.last_sequence)
            if named is None:
                continue
            known.append((named.sequence, named.event))
            for extension in self.core.extensions:
                with suppressed():  # an extension's code may raise; its notes are optional
                    cause.notes += extension.evidence(tuple(known), self.configuration)

    # --- what happened to the request -------------------------------------------------------------

    def _happenings(self) -> Iterator[Cause]:
        events = [self.histories.events[at] for at in self.history.moments if at in self.histories.events]
        for index, named in enumerate(events):
            if not isinstance(named.event, e.StepScheduled):
                yield self._happening(named, events[:index], events[index + 1 :])

    def _happening(self, named: NamedEvent, before: Sequence[NamedEvent], after: Sequence[NamedEvent]) -> Cause:
        event = named.event
        text = describe(event, self.core)
        text = text if isinstance(event, e.ExtensionEvent) else text or event.id
        cause = Cause(event.id, named.sequence, named.sequence, named.time_ns, text)
        if isinstance(event, e.RequestPreempted):
            step = next((other for other in after if isinstance(other.event, e.StepScheduled)), None)
            self._explain_preemption(cause, before, step)
        elif isinstance(event, e.RequestQuarantined):
            cause.evidence = (event.cause,)
            broken = next((other for other in reversed(before) if isinstance(other.event, e.InvariantViolated)), None)
            if broken is not None and getattr(broken.event, "cause", 0) == event.cause:
                cause.evidence = (event.cause, broken.sequence)
                cause.text += f", because rule {event.reason} was broken at event {event.cause}"
            else:
                cause.text += f", because of event {event.cause}"
        elif event.is_decision:
            cause.evidence = (getattr(event, "cause", 0),)
        return cause

    def _held_text(self, num_held: int) -> str:
        """Return for example `59 of 60 blocks`; empty if one of the numbers is unknown."""
        total = self.num_device_blocks
        return f"{num_held} of {plural(total, 'block')}" if num_held and total else ""

    def _explain_preemption(self, cause: Cause, before: Sequence[NamedEvent], step: NamedEvent | None) -> None:
        own = next((each for each in self.history.preemptions if each.sequence == cause.sequence), None)
        if own is not None:
            cause.num_blocks_held = own.num_held
            held = self._held_text(own.num_held)
            cause.text += f", when requests held {held}" if held else ""
        last = before[-1] if before else None
        if last is not None and isinstance(last.event, e.CacheReset) and last.time_ns == cause.time_ns:
            cause.evidence = (last.sequence,)
            cause.text += f"; inferred: the cache reset at event {last.sequence} took the request's blocks"
            return
        if step is None or not isinstance(step.event, e.StepScheduled):
            cause.text += "; the step for which vLLM took the request's blocks is not in the log"
            return
        cause.evidence = (step.sequence,)
        event = step.event
        # Requests that are not listed decode one token each, so the remaining tokens of the step are their number.
        steady = event.num_scheduled_tokens - sum(scheduled for _, _, scheduled, _ in event.advanced)
        num_requests = len(event.advanced) + max(0, steady)
        ran = f"{plural(num_requests, 'request')} ran {plural(event.num_scheduled_tokens, 'token')}"
        others = [
            f"{self.histories.names.get(ordinal) or f'number {ordinal}'} ({len(block_ids)})"
            for ordinal, block_ids in event.extended
            if ordinal != self.history.ordinal
        ]
        cause.text += f". In step {event.step} (event {step.sequence}) {ran}"
        full = ""
        if own is not None and own.is_full:
            full = f"this request's {plural(own.num_blocks, 'block')} were full, so it needed another block"
        if others:
            cause.text += (
                f", and blocks went to {', '.join(others)}. vLLM takes a running request's blocks when another request "
                "needs one and none is free; inferred: vLLM took this request's blocks for that request"
                f"{f' ({full} itself)' if full else ''}"
            )
        elif full:
            cause.text += (
                f", and no other request got a block; {full}. vLLM takes the blocks of the last running request; "
                "inferred: this request was the last one"
            )
        else:
            cause.text += (
                ", and the log does not show that another request got a block; inferred: the prefix cache was reset, "
                "or the request needed a block itself"
            )

    # --- lookups, admissions, steps ---------------------------------------------------------------

    def _lookup(self, lookup: Lookup, *, is_first: bool) -> Cause:
        answered = self.histories.events.get(lookup.first_sequence)  # a later answer may only repeat the first
        words = text = "looked up" if answered is None else describe(answered.event, self.core)
        time_ns = 0 if answered is None else answered.time_ns
        until_ns = max(time_ns, self.histories.time_ns(lookup.last_sequence) or 0)
        arrived = self.histories.events.get(self.history.moments[0]) if is_first and self.history.moments else None
        waited_ns = time_ns - arrived.time_ns if arrived and isinstance(arrived.event, e.RequestArrived) else 0
        repeated = lookups_in_a_row(lookup.num_times, until_ns - time_ns, waited_ns)
        held = self._held_text(lookup.num_held) if is_first and repeated else ""
        held = f"; at first, requests held {held}" if held else ""
        text += repeated + held
        if lookup.awaited is not None:
            text += _awaited_text(lookup.awaited)
        asked = lookup.first_sequence if answered is None else getattr(answered.event, "cause", 0)
        cause = Cause("lookup", asked, lookup.last_sequence, time_ns, text, words, lookup.num_times)
        cause.until_ns, cause.waited_ns, cause.spans = until_ns, waited_ns, lookup.spans
        cause.num_blocks_held, cause.held = lookup.num_held, held
        cause.reasons = self._texts(lookup.spans, time_ns)
        return cause

    def _admission(self, admission: Admission) -> Cause:
        time_ns = self.histories.time_ns(admission.sequence) or 0
        num_left = sum(span.num_tokens for span in admission.missed)
        reset, of_retained = admission.reset_sequence, admission.num_retained_before_reset
        retained = f"{admission.num_retained} of them from vLLM's prefix cache{_dated(of_retained, reset)}"
        parts = [retained] if admission.num_retained else []
        claimed = f"{admission.num_claimed} to be loaded{_dated(admission.num_before_reset, reset)}"
        parts += [claimed] if admission.num_claimed else []
        parts += [f"{admission.num_elsewhere} from elsewhere"] if admission.num_elsewhere else []
        parts.append(f"{num_left} left to compute")
        text = f"admitted with {plural(admission.num_tokens, 'token')}: {', '.join(parts)}"
        held = self._held_text(admission.num_held)
        text += f"; all requests together now hold {held}" if held else ""
        left = (*admission.not_loaded, *admission.missed)
        cause = Cause("admission", admission.sequence, admission.sequence, time_ns, text, spans=left)
        cause.num_blocks_held = admission.num_held
        cause.evidence = tuple(filter(None, (admission.answer_sequence, admission.reset_sequence)))
        answers = (lookup for lookup in self.history.lookups if lookup.last_sequence == admission.answer_sequence)
        explained = {(span.end_token, span.reason) for lookup in answers for span in lookup.spans}
        new = [span for span in left if (span.end_token, span.reason) not in explained]
        cause.reasons = self._texts(new, time_ns)
        if admission.duplicated is not None:
            cause.reasons.append(self._duplicated_text(admission.duplicated))
        return cause

    def _duplicated_text(self, other: SharedLoad) -> str:
        where = _where(other.first_token, other.end_token, self.configuration.chunk_size)
        which = f"load {other.job_id} of {other.request_id} (event {other.sequence})"
        return f"{where}: duplicated, because {which} was already loading them"

    def _recomputed(self, again: Recomputation) -> Cause:
        time_ns = self.histories.time_ns(again.sequence) or 0
        what = "computed_twice" if again.after_rollback else "recomputed"
        cause = Cause(what, again.sequence, again.sequence, time_ns, "", spans=again.spans)
        cause.reasons = self._texts([span for span in again.spans if span.reason in _SINCE_LOOKUP], time_ns)
        return cause

    def _texts(self, spans: Sequence[Span], before_ns: int) -> list[str]:
        return [
            reason_text(group, self.histories, self.configuration.chunk_size, before_ns) for group in groups_of(spans)
        ]


def _dated(num_tokens: int, reset_sequence: int) -> str:
    """Return text that says how many tokens are older than a reset of vLLM's cache; empty if `num_tokens` is 0."""
    if not num_tokens:
        return ""
    return (
        f" ({num_tokens} of these are older than event {reset_sequence}, which reset vLLM's cache but not the "
        "connector's: their KV is right only if the weights have not changed since that event)"
    )


def _awaited_text(load: SharedLoad) -> str:
    where = _where(load.first_token, load.end_token, None)
    return (
        f"; the request waits for load {load.job_id} of {load.request_id} (event {load.sequence}), which already loads "
        f"{where}"
    )


def _merged(causes: Sequence[Cause], recomputed: Sequence[Cause]) -> list[Cause]:
    """Merge causes and recomputations in the order of the log. Recomputations in a row with equal `what` become one."""
    result: list[Cause] = []
    for cause in sorted((*causes, *recomputed), key=lambda cause: cause.last_sequence):
        last = result[-1] if result else None
        if last is not None and cause.what == last.what and cause.what in _COMPUTED_AGAIN:
            last.last_sequence = cause.last_sequence
            last.num_times += 1
            last.spans = joined((*last.spans, *cause.spans))
            last.reasons += [reason for reason in cause.reasons if reason not in last.reasons]
        else:
            result.append(cause)
    for cause in result:
        if cause.what in _COMPUTED_AGAIN:
            tokens: Counter[Reason] = Counter()
            for span in cause.spans:
                tokens[span.reason] += span.num_tokens
            steps = "" if cause.num_times == 1 else f" in {plural(cause.num_times, 'step')}"
            by_reason = ", ".join(f"{plural(count, 'token')} {reason}" for reason, count in tokens.items())
            again = f"computed {plural(tokens.total(), 'token')} again{steps}"
            cause.text = f"{again}{_COMPUTED_AGAIN[cause.what]}: {by_reason}"
    return result


# --- reasons ------------------------------------------------------------------------------------


def groups_of(spans: Sequence[Span]) -> Iterator[list[Span]]:
    """Yield groups of adjacent spans. All spans of a group have the same reason and the same request or event."""
    group: list[Span] = []
    for span in spans:
        if group and (group[-1].end_token != span.first_token or _origin(group[-1]) != _origin(span)):
            yield group
            group = []
        group.append(span)
    if group:
        yield group


def _origin(span: Span) -> tuple[object, ...]:
    fact = span.fact
    if span.reason is Reason.BEHIND_GAP or span.reason in BY_DESIGN:
        return (span.reason,)
    if fact is None:
        return (span.reason, span.evidence)
    return (span.reason, fact.status, fact.request_id, fact.cause, fact.detail, fact.earlier is None)


def reason_text(spans: Sequence[Span], histories: Histories, chunk_size: int, before_ns: int | None) -> str:
    """Return in words why the tokens of these spans, which all have the same reason, were left to compute.

    `before_ns`: the time at which the tokens were missed; None: unknown.
    """
    first, reason = spans[0], spans[0].reason
    where = _where(first.first_token, spans[-1].end_token, None if reason in _WITHOUT_CHUNKS else chunk_size)
    facts = [span.fact for span in spans if span.fact is not None]
    if facts and reason is not Reason.BEHIND_GAP:
        return f"{where}: {_fact_text(reason, facts, histories, before_ns)}"
    if not first.evidence or reason not in _PROVEN:
        return f"{where}: {reason.meaning}"
    named = histories.events.get(first.evidence[0])
    event = None if named is None else named.event
    what = ""
    if isinstance(event, e.LoadFailed | e.RequestQuarantined | e.InvariantViolated | e.HookFailed):
        what = f": {describe_core_event(event)}"
    proof = _when(first.evidence[:1], histories, before_ns).removeprefix(" at ")
    return f"{where}: {reason.meaning} ({proof}{what})"


def _where(first_token: int, end_token: int, chunk_size: int | None) -> str:
    tokens = f"token {first_token}" if end_token == first_token + 1 else f"tokens {first_token}–{end_token - 1}"
    if chunk_size is None:
        return tokens
    first, last = first_token // chunk_size, -(-end_token // chunk_size) - 1
    return f"{tokens} (chunk {first})" if first == last else f"{tokens} (chunks {first}–{last})"


def _fact_text(reason: Reason, facts: Sequence[ChunkFact], histories: Histories, before_ns: int | None) -> str:
    fact = facts[0]
    when = _when([one.sequence for one in facts], histories, before_ns)
    owner = _owner(fact, histories)
    if reason is Reason.EVICTED:
        text = f"evicted for a save of {owner}{when}"
    elif reason is Reason.DECLINED:
        text = f"not saved by {owner}{when}, because {WHY_DECLINED.get(fact.detail, fact.detail)}"
    elif reason is Reason.SAVE_FAILED:
        text = f"save {fact.job_id} by {owner} failed{when}: {fact.detail}"
    elif reason in {Reason.SAVING, Reason.DEFERRAL_EXHAUSTED}:
        save = f"save {fact.job_id}" if fact.job_id != fact.sequence else "a save"  # a recorded save has no number
        text = f"{save} by {owner}, issued{when}, was still in flight"
        if reason is Reason.DEFERRAL_EXHAUSTED:
            text += " after the last allowed deferral of the lookup"
    elif reason is Reason.UNSAVED:
        text = f"known to {owner}{when}, but no save had been issued"
    elif reason in _OF_RECORDED:
        text = _OF_RECORDED[reason].format(owner=owner, when=when)
    else:
        text = f"{reason.meaning}{when}"
    return text + _earlier_text(fact.earlier, histories, before_ns)


def _earlier_text(fact: ChunkFact | None, histories: Histories, before_ns: int | None) -> str:
    if fact is None:
        return ""
    when = _when([fact.sequence], histories, before_ns)
    if fact.status is ChunkStatus.SAVED:
        return f"; it had been saved by {_owner(fact, histories)}{when}"
    if fact.status is ChunkStatus.SAVING:
        return f"; save {fact.job_id} of {_owner(fact, histories)} was in flight{when}"
    by = f" for a save of {_owner(fact, histories)}" if fact.status is ChunkStatus.EVICTED else ""
    return f"; before, it had been {fact.status}{by}{when}" + _earlier_text(fact.earlier, histories, before_ns)


def _owner(fact: ChunkFact, histories: Histories) -> str:
    own = {(history.request_id, history.ordinal) for history in histories.of_lives}
    is_own = (fact.request_id, fact.ordinal) in own
    return "the request itself" if is_own else f"request {fact.request_id or '(not recorded)'}"


def _when(sequences: Sequence[int], histories: Histories, before_ns: int | None) -> str:
    numbers = sorted({number for number in sequences if number})
    if not numbers:
        return ""
    at = f" at event {numbers[0]}" if len(numbers) == 1 else f" at events {ranges(numbers)}"
    time_ns = histories.time_ns(numbers[-1])
    if time_ns is None or before_ns is None or time_ns >= before_ns:
        return at
    return f"{at}, {duration(before_ns - time_ns)} before"
