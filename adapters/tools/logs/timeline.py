"""The timeline of a request as groups of events, in words. Most groups are an observation with all its decisions.

Consecutive steps in which a request only computes and saves become one group. So do equal lookups in a row.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import msgspec

from kvledger.adapters.tools.logs.describe import describe, describe_decisions, lookups_in_a_row
from kvledger.adapters.tools.logs.log import Gap, StoredLog
from kvledger.adapters.tools.logs.observation import Observation, ObservationVisitor
from kvledger.adapters.tools.logs.reading import begin_model
from kvledger.adapters.tools.logs.report_shares import shares_of
from kvledger.adapters.units import duration, plural, size
from kvledger.lifecycle import Core, RequestState, SequencedEvent
from kvledger.lifecycle import events as e
from kvledger.lifecycle.reader import Copy, Life, Model

_QUIET_DECISIONS = (e.SaveIssued, e.PrefillAdvanced, e.PrefillCompleted)
"""Decisions on a step that get no line of their own."""
_ABOUT_ALL = (e.StepScheduled, e.TransferReported, e.CacheReset, e.LogNote)
"""Observations that name no request and may concern several."""
_NO_ANSWER = "looked up; the log has no answer"


class Group(msgspec.Struct, forbid_unknown_fields=True):
    """Events that are shown together. Times in nanoseconds since the log was opened."""

    what: str
    """A stable word: `arrived`, `lookup`, `prefill`, `decode`, `transfer`, an event's id, or `lost`."""
    first_sequence: int
    last_sequence: int
    time_ns: int
    until_ns: int
    state_before: str | None
    state_after: str | None
    generation: int | None
    texts: list[str] = []
    num_moments: int = 1
    """Number of observations in the group."""
    first_token: int = 0
    num_tokens: int = 0
    num_blocks: int = 0
    num_chunks_to_save: int = 0
    """Chunks of saves that were issued in this group. A later group shows the result when ranks report the save."""
    num_bytes: int = 0
    duration_ns: int = 0
    """Nanoseconds that the reported copies took. The time of a report about several copies is divided among them."""
    num_broken: int = 0
    """Number of broken rules in the group."""
    waited_ns: int = 0
    """Time from the request's arrival to its first lookup, in the group of this lookup; 0 in other groups."""

    @property
    def text(self) -> str:
        """The group in words."""
        parts = list(self.texts)
        if self.what in {"prefill", "decode"}:
            verb = "decoded" if self.what == "decode" else "computed"
            steps = "" if self.num_moments == 1 else f" in {plural(self.num_moments, 'step')}"
            end = self.first_token + self.num_tokens
            parts.insert(0, f"{verb} {plural(self.num_tokens, 'token')}{steps} ({self.first_token} → {end})")
            if self.num_blocks:
                parts.append(f"{plural(self.num_blocks, 'more block')}")
            if self.num_chunks_to_save:
                parts.append(f"saving {plural(self.num_chunks_to_save, 'chunk')}")
        elif self.what == "lookup":
            parts[0] += lookups_in_a_row(self.num_moments, self.until_ns - self.time_ns, self.waited_ns)
        if self.num_bytes:
            parts.append(f"{size(self.num_bytes)} in {duration(self.duration_ns)}")
        return "; ".join(parts)


class State(msgspec.Struct, forbid_unknown_fields=True):
    """State from which timelines continue."""

    groups: dict[str, list[Group]]
    """Request id → its groups so far."""
    lost: Group | None = None
    """The group of events that shows the last gap; None: no gap yet."""


@attrs.frozen
class _Seen:
    """An observation, and what it means for one request."""

    request_id: str
    groups: list[Group]
    observation: Observation
    """The observation with only the decisions that concern the request."""
    life: Life | None
    is_over: bool
    """Whether the life ended here."""
    state_before: str | None
    state_after: str | None

    @property
    def decisions(self) -> list[e.Event]:
        """Decisions that concern the request."""
        return [event for _, event in self.observation.decisions]


class Timelines(ObservationVisitor):
    """Collects groups of events for some request ids, for all lives of each id.

    The groups of a life depend only on events that name its request, and on observations about all requests, such as
    steps. Events before the arrival need not be read.
    """

    needs = ("lives", "tables", "copies")
    state: State

    def __init__(self, model: Model, core: Core, request_ids: Iterable[str]) -> None:
        super().__init__(model)
        self.state = State({request_id: [] for request_id in request_ids})
        self._core = core

    def lost(self, first_sequence: int, last_sequence: int) -> None:
        """Add a group about missing events to each request that is alive.

        If a request id has no life and no groups yet, this group is added before its first group.
        """
        now_ns, text = self.moment.time_ns, str(Gap(first_sequence, last_sequence))
        self.state.lost = Group("lost", first_sequence, last_sequence, now_ns, now_ns, None, None, None, [text])
        for request_id, groups in self.state.groups.items():
            if self.model.lives.get(request_id) is not None:
                groups.append(self.state.lost)

    def observed(self, observation: Observation) -> None:
        """Add the observation to each request that it concerns, as a new group or to the request's last group."""
        events = (observation.event, *(event for _, event in observation.decisions))
        named = {getattr(event, "request_id", "") for event in events}
        is_about_all = isinstance(events[0], _ABOUT_ALL) or any(isinstance(each, e.ExtensionStopped) for each in events)
        every = self.state.groups
        chosen = named.intersection(every)
        if is_about_all:
            chosen.update(request_id for request_id in self.present_ids() if request_id in every)
        for request_id in chosen:
            life, groups = self.life_of(request_id), every[request_id]
            if not groups and self.state.lost is not None:  # its id may have been used in the missing events
                groups.append(self.state.lost)
            is_over = self.model.lives.get(request_id) is None
            own = Observation(observation.sequence, events[0], _concerning(observation, request_id, life))
            self._add_seen(_Seen(request_id, groups, own, life, is_over, *self.paths(request_id)))

    def _add_seen(self, seen: _Seen) -> None:
        event = seen.observation.event
        if isinstance(event, e.StepScheduled):
            self._add_step(seen, event)
        elif isinstance(event, e.TransferReported) and self._reported(seen.request_id):
            self._add_report(seen, event)
        elif getattr(event, "request_id", None) == seen.request_id:
            self._add_own(seen)
        elif seen.life is not None and isinstance(event, e.CacheReset | e.LogNote):
            self._add(seen, event.id, self._text(seen))
        else:
            self._add_decisions(seen)

    def _add_decisions(self, seen: _Seen) -> None:
        """Add the decisions about this request that were made on an observation about other requests."""
        if seen.decisions:
            self._add(seen, seen.decisions[0].id, "")

    def _add_step(self, seen: _Seen, event: e.StepScheduled) -> None:
        life, state = seen.life, (seen.state_before or seen.state_after or "").partition(".")[0]
        if life is None or seen.is_over or state == RequestState.FINISHED:
            self._add_decisions(seen)
            return
        first, end = self.model.lives.num_computed_before_step(life), self.model.lives.num_computed_tokens(life)
        num_blocks = sum(len(block_ids) for ordinal, block_ids in event.extended if ordinal == life.ordinal)
        if not (seen.decisions or num_blocks or end != first):
            return
        what = "decode" if state == RequestState.RUNNING else "prefill"
        group = self._continued(what, seen)
        if group is None:
            group = self._add(seen, what, "")
            group.first_token = first
        group.num_tokens = end - group.first_token
        group.num_blocks += num_blocks
        group.num_chunks_to_save += sum(len(each.chunks) for each in seen.decisions if isinstance(each, e.SaveIssued))
        loud = (decision for decision in seen.decisions if not isinstance(decision, _QUIET_DECISIONS))
        group.texts += describe_decisions(loud, self._core)

    def _continued(self, what: str, seen: _Seen) -> Group | None:
        """Add this step to the request's last group, and return the group. Return None if a new group must begin."""
        last = seen.groups[-1] if seen.groups else None
        if last is None or last.what != what or last.state_after != seen.state_before:
            return None
        if not all(isinstance(decision, _QUIET_DECISIONS) for decision in seen.decisions):
            return None
        last.num_moments += 1
        last.last_sequence, last.until_ns = seen.observation.last_sequence, self.moment.time_ns
        last.state_after = seen.state_after
        return last

    def _reported(self, request_id: str) -> list[Copy]:
        """Return the request's copies in the current report."""
        copies = [reported.job for reported in self.model.copies.reported]
        return [copy for copy in copies if copy is not None and copy.request_id == request_id]

    def _add_report(self, seen: _Seen, event: e.TransferReported) -> None:
        copies = self._reported(seen.request_id)
        is_quiet = not copies[0].is_load and all(isinstance(each, e.SaveCompleted) for each in seen.decisions)
        last = seen.groups[-1] if seen.groups else None
        if is_quiet and not event.ranks_failed and last is not None and last.what in {"prefill", "decode"}:
            last.last_sequence = seen.observation.last_sequence
        else:
            last = self._add(seen, "transfer", "")
            if not seen.decisions:
                kind, num_ranks = "load" if copies[0].is_load else "save", len(self.model.copies.every_rank)
                done = plural(len(event.ranks_done), "rank")
                last.texts.append(f"{done} of {num_ranks} did {kind} {copies[0].job_id}")
            last.num_tokens = copies[0].num_tokens if copies[0].is_load else 0
        job_ids = {copy.job_id for copy in copies}
        for job_id, num_bytes, duration_ns in shares_of(event):
            if job_id in job_ids:
                last.num_bytes += num_bytes
                last.duration_ns += duration_ns

    def _add_own(self, seen: _Seen) -> None:
        event = seen.observation.event
        if isinstance(event, e.ChunkKeysObserved) and not seen.decisions:
            return
        has_answer = any(isinstance(each, e.LookupAnswered | e.LookupDeferred) for each in seen.decisions)
        if isinstance(event, e.LookupRequested) or has_answer:
            self._add_lookup(seen)
            return
        group = self._add(seen, "arrived" if isinstance(event, e.RequestArrived) else event.id, self._text(seen))
        if isinstance(event, e.BlocksAllocated | e.BlockTableObserved):
            group.num_blocks = len(event.block_ids)

    def _add_lookup(self, seen: _Seen) -> None:
        """Add a lookup. A recorded connector's answer is a later event, which is added to the lookup's group."""
        groups = seen.groups
        asked = groups.pop() if groups and groups[-1].texts == [_NO_ANSWER] else None
        before = groups[-1] if groups else None
        begun = next((each for each in reversed(groups) if each.what in {"arrived", "lookup"}), None)
        group = self._add(seen, "lookup", self._text(seen))
        group.texts = group.texts or [_NO_ANSWER]
        if asked is not None:
            group.first_sequence, group.time_ns, group.state_before = (
                asked.first_sequence,
                asked.time_ns,
                asked.state_before,
            )
        if begun is not None and begun.what == "arrived":
            group.waited_ns = group.time_ns - begun.time_ns
        if before is not None and before.what == "lookup" and before.texts == group.texts:
            groups.pop()
            before.num_moments += 1
            before.last_sequence, before.until_ns = group.last_sequence, group.until_ns

    def _add(self, seen: _Seen, what: str, text: str) -> Group:
        texts = [text] if text else []
        if what not in {"prefill", "decode"}:
            texts += describe_decisions(seen.decisions, self._core)
        observation, now_ns = seen.observation, self.moment.time_ns
        group = Group(
            what,
            observation.sequence,
            observation.last_sequence,
            now_ns,
            now_ns,
            seen.state_before,
            seen.state_after,
            None if seen.life is None or seen.is_over else seen.life.generation,
            texts,
            num_broken=sum(isinstance(each, e.InvariantViolated) for each in (observation.event, *seen.decisions)),
        )
        seen.groups.append(group)
        return group

    def _text(self, seen: _Seen) -> str:
        """Return the observation in words."""
        event = seen.observation.event
        text = describe(event, self._core)
        if not text and not isinstance(event, e.LookupRequested | e.ExtensionObserved):
            text = event.id
        if isinstance(event, e.RequestArrived):
            number = 1 + sum(group.what == "arrived" for group in seen.groups)
            return text if number == 1 else f"{text}, life {number} of this id"
        if isinstance(event, e.RequestPreempted) and seen.life is not None:
            num_blocks = len(self.model.tables.lost_by(seen.life))
            if num_blocks or not seen.life.is_partial:
                return f"{text}, lost {plural(num_blocks, 'block')}"
        return text


def begin_timelines(log: StoredLog, request_ids: Iterable[str]) -> Timelines:
    """Return timelines for a log that will be read from its beginning or from its first snapshot."""
    timelines = Timelines(begin_model(log), log.core, request_ids)
    if log.start_sequence:
        timelines.lost(1, log.start_sequence)
    return timelines


def _concerning(observation: Observation, request_id: str, life: Life | None) -> list[SequencedEvent]:
    """Return the decisions that concern this request."""
    found: list[SequencedEvent] = []
    for sequence, event in observation.decisions:
        if isinstance(event, e.ExtensionStopped):
            concerns = life is not None
        elif isinstance(event, e.ChunksTainted):
            concerns = bool(found)
        else:
            concerns = getattr(event, "request_id", None) == request_id
        if concerns:
            found.append((sequence, event))
    return found
