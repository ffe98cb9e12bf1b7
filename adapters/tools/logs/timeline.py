"""The timeline of a request as groups of events: an observation with all that was decided on it, in words.

Steps in which a request only computes and saves are gathered into one group, and so are equal lookups.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from kvledger.adapters.tools.logs.describe import describe, describe_decisions, lookups_in_a_row
from kvledger.adapters.tools.logs.log import Gap
from kvledger.adapters.tools.logs.observation import Observation
from kvledger.adapters.units import duration, plural, size
from kvledger.lifecycle import Core, LedgerConfiguration, Projections, RequestState, SequencedEvent
from kvledger.lifecycle import events as e

_QUIET_DECISIONS = (e.SaveIssued, e.PrefillAdvanced, e.PrefillCompleted)
"""Decisions on a step that do not deserve a line of their own."""
_NO_ANSWER = "asked what can be loaded; the log has no answer"


@attrs.define
class Group:
    """Events that are shown together. Times in nanoseconds since the log was opened."""

    what: str
    """A stable word: `arrived`, `lookup`, `prefill`, `decode`, `transfer`, the observation's id, or `lost`."""
    first_sequence: int
    last_sequence: int
    time_ns: int
    until_ns: int
    state_before: str | None
    state_after: str | None
    generation: int | None
    texts: list[str] = attrs.field(factory=list)
    num_moments: int = 1
    """How many observations are in it."""
    first_token: int = 0
    num_tokens: int = 0
    num_blocks: int = 0
    num_chunks_to_save: int = 0
    """By saves that were issued here; how each came out is told where it was reported."""
    num_bytes: int = 0
    duration_ns: int = 0
    """Time that transfers took, added up over their reports."""
    num_broken: int = 0
    """Rules that were broken here."""
    waited_ns: int = 0
    """From the arrival to a first lookup."""

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


class Timelines:
    """Folds a log and keeps the groups of some request ids, through all their incarnations.

    Each projection here makes a request's part from that request's own events alone. So what happened before the
    request arrived may be left out; the host pool, which everybody shares, is not here.
    """

    def __init__(self, core: Core, configuration: LedgerConfiguration, request_ids: Iterable[str]) -> None:
        self._known = core.new_projections(configuration, only=("extensions", "sub_states", "tracker"))
        self._timelines = {name: _Timeline(name, core, self._known, configuration.num_ranks) for name in request_ids}
        self._active: dict[str, _Timeline] = {}
        """Those of requests that are there now: of all others there is nothing to ask."""
        self._gap: Gap | None = None

    @property
    def groups(self) -> dict[str, list[Group]]:
        """The groups so far of each request id."""
        return {name: timeline.groups for name, timeline in self._timelines.items()}

    def lose(self, gap: Gap) -> None:
        """Events are missing here."""
        self._gap = gap
        for timeline in self._active.values():
            timeline.lose(gap)

    def take(self, observation: Observation) -> None:
        """Take up the next observation of the log."""
        own = getattr(observation.event, "request_id", "")
        timeline = self._timelines.get(own)
        if timeline is not None:
            if self._gap is not None and not timeline.groups:
                timeline.lose(self._gap)  # in which its id may have been used before
            self._active[own] = timeline
        for timeline in self._active.values():
            timeline.begin()
        for sequence, event in observation:
            self._known.fold(event, sequence)
        for name, timeline in tuple(self._active.items()):
            timeline.end(observation)
            if self._known.tracker.get(name) is None:
                del self._active[name]


class _Timeline:
    """The groups of one request id."""

    def __init__(self, request_id: str, core: Core, known: Projections, num_ranks: int) -> None:
        self.request_id = request_id
        self.groups: list[Group] = []
        self._num_ranks = num_ranks
        self._known = known
        self._core = core
        self._tracker = known.tracker
        self._state_before: str | None = None
        self._num_computed_before = 0
        self._jobs: dict[int, e.LoadIssued | e.SaveIssued | e.TailSaveIssued] = {}
        self._num_incarnations = 0
        self._arrived_ns: int | None = None
        """None also from its first lookup on."""

    def lose(self, gap: Gap) -> None:
        """Say that events are missing here."""
        now = self._tracker.time_ns
        self.groups.append(Group("lost", gap.first_sequence, gap.last_sequence, now, now, None, None, None, [str(gap)]))

    def begin(self) -> None:
        """Note what is so before an observation is folded."""
        record = self._tracker.get(self.request_id)
        self._state_before = None if record is None else record.path
        self._num_computed_before = 0 if record is None else self._tracker.num_computed_tokens(record)

    def end(self, observation: Observation) -> None:
        """Make a group of the observation, which is folded now, or add it to the last one."""
        if observation.event.is_decision:
            return
        moment = Observation(observation.sequence, observation.event, self._concerning(observation))
        if isinstance(moment.event, e.RequestArrived) and moment.event.request_id == self.request_id:
            self._state_before = None  # that was the state of the life before
        for _, event in moment.decisions:
            if isinstance(event, e.LoadIssued | e.SaveIssued | e.TailSaveIssued):
                self._jobs[event.job_id] = event
        if isinstance(moment.event, e.StepScheduled):
            self._close_step(moment, moment.event)
        elif isinstance(moment.event, e.TransferReported) and not self._jobs.keys().isdisjoint(moment.event.job_ids):
            self._close_report(moment, moment.event)
        elif getattr(moment.event, "request_id", None) == self.request_id:
            self._close_request_event(moment)
        elif self._state_before is not None and isinstance(moment.event, e.CacheReset | e.LogNote):
            self._add(moment, moment.event.id, self._observation_text(moment.event))
        elif moment.decisions:  # upon what concerns others
            self._add(moment, moment.decisions[0][1].id, "")

    def _concerning(self, observation: Observation) -> list[SequencedEvent]:
        """The decisions that concern this request."""
        found: list[SequencedEvent] = []
        for sequence, event in observation.decisions:
            if isinstance(event, e.ExtensionStopped):
                concerns = self._state_before is not None
            elif isinstance(event, e.ChunksTainted):
                concerns = bool(found)
            else:
                concerns = getattr(event, "request_id", None) == self.request_id
            if concerns:
                found.append((sequence, event))
        return found

    def _close_step(self, moment: Observation, event: e.StepScheduled) -> None:
        record = self._tracker.get(self.request_id)
        if record is None or self._state_before is None:
            return
        num_computed = self._tracker.num_computed_tokens(record)
        num_blocks = sum(len(block_ids) for ordinal, block_ids in event.extended if ordinal == record.ordinal)
        scheduled = any(ordinal == record.ordinal for ordinal, *_ in event.advanced)
        if not (moment.decisions or num_blocks or scheduled or num_computed != self._num_computed_before):
            return
        what = "decode" if self._state_before.partition(".")[0] == RequestState.RUNNING else "prefill"
        group = self._continued(what, moment)
        if group is None:
            group = self._add(moment, what, "")
            group.first_token = next(
                (first for ordinal, first, *_ in event.advanced if ordinal == record.ordinal),
                self._num_computed_before,
            )
        group.num_tokens = num_computed - group.first_token
        group.num_blocks += num_blocks
        decisions = [decision for _, decision in moment.decisions]
        group.num_chunks_to_save += sum(len(d.chunks) for d in decisions if isinstance(d, e.SaveIssued))
        loud = (decision for decision in decisions if not isinstance(decision, _QUIET_DECISIONS))
        group.texts += describe_decisions(loud, self._core)

    def _close_report(self, moment: Observation, event: e.TransferReported) -> None:
        pairs = zip(event.job_ids, event.num_bytes, strict=False)
        own = {job_id: num_bytes for job_id, num_bytes in pairs if job_id in self._jobs}
        job_id = next(iter(own))
        job = self._jobs[job_id]
        settled = [decision for _, decision in moment.decisions]
        last = self.groups[-1] if self.groups else None
        is_quiet = not isinstance(job, e.LoadIssued) and all(isinstance(d, e.SaveCompleted) for d in settled)
        if is_quiet and not event.ranks_failed and last is not None and last.what in {"prefill", "decode"}:
            last.last_sequence = moment.last_sequence
        else:
            last = self._add(moment, "transfer", "")
            if not settled:
                kind = "load" if isinstance(job, e.LoadIssued) else "save"
                last.texts.append(f"{plural(len(event.ranks_done), 'rank')} of {self._num_ranks} did {kind} {job_id}")
            last.num_tokens = job.num_tokens if isinstance(job, e.LoadIssued) else 0
        last.num_bytes += sum(own.values())
        last.duration_ns += event.duration_ns
        if any(isinstance(d, e.LoadCompleted | e.LoadFailed | e.SaveCompleted | e.SaveFailed) for d in settled):
            for job_id in own:
                del self._jobs[job_id]

    def _close_request_event(self, moment: Observation) -> None:
        event = moment.event
        if isinstance(event, e.ChunkKeysObserved) and not moment.decisions:
            return
        has_answer = any(isinstance(each, e.LookupAnswered | e.LookupDeferred) for _, each in moment.decisions)
        if isinstance(event, e.LookupRequested) or has_answer:
            self._close_lookup(moment)
            return
        what = "arrived" if isinstance(event, e.RequestArrived) else event.id
        group = self._add(moment, what, self._observation_text(moment.event))
        if isinstance(event, e.BlocksAllocated | e.BlockTableObserved):
            group.num_blocks = len(event.block_ids)

    def _close_lookup(self, moment: Observation) -> None:
        """Somebody else's answer has an event of its own, behind the question's; then the two are one."""
        asked = self.groups.pop() if self.groups and self.groups[-1].texts == [_NO_ANSWER] else None
        before = self.groups[-1] if self.groups else None
        group = self._add(moment, "lookup", self._observation_text(moment.event))
        group.texts = group.texts or [_NO_ANSWER]
        if asked is not None:
            group.first_sequence, group.time_ns, group.waited_ns, group.state_before = (
                asked.first_sequence,
                asked.time_ns,
                asked.waited_ns,
                asked.state_before,
            )
        if self._arrived_ns is not None:
            group.waited_ns, self._arrived_ns = group.time_ns - self._arrived_ns, None
        if before is not None and before.what == "lookup" and before.texts == group.texts:
            self.groups.pop()
            before.num_moments += 1
            before.last_sequence, before.until_ns = group.last_sequence, group.until_ns

    def _continued(self, what: str, moment: Observation) -> Group | None:
        """The last group, if this step only goes on with it."""
        last = self.groups[-1] if self.groups else None
        if last is None or last.what != what or last.state_after != self._state_before:
            return None
        if not all(isinstance(decision, _QUIET_DECISIONS) for _, decision in moment.decisions):
            return None
        last.num_moments += 1
        last.last_sequence = moment.last_sequence
        last.until_ns = self._tracker.time_ns
        record = self._tracker.get(self.request_id)
        last.state_after = None if record is None else record.path
        return last

    def _add(self, moment: Observation, what: str, text: str) -> Group:
        record = self._tracker.get(self.request_id)
        decisions = [decision for _, decision in moment.decisions]
        texts = [text] if text else []
        if what not in {"prefill", "decode"}:
            texts += describe_decisions(decisions, self._core)
        group = Group(
            what,
            moment.sequence,
            moment.last_sequence,
            getattr(moment.event, "time_ns", self._tracker.time_ns),
            getattr(moment.event, "time_ns", self._tracker.time_ns),
            self._state_before,
            None if record is None else record.path,
            None if record is None else record.generation,
            texts,
            num_broken=sum(isinstance(d, e.InvariantViolated) for d in (moment.event, *decisions)),
        )
        self.groups.append(group)
        return group

    def _observation_text(self, event: e.Event) -> str:
        text = describe(event, self._core)
        if not text and not isinstance(event, e.LookupRequested | e.ExtensionObserved):
            text = event.id
        if isinstance(event, e.RequestArrived):
            self._num_incarnations, self._arrived_ns = self._num_incarnations + 1, event.time_ns
            return text if self._num_incarnations == 1 else f"{text}, incarnation {self._num_incarnations} of this id"
        if isinstance(event, e.RequestPreempted):
            record = self._known.tracker.get(self.request_id)
            num_blocks = 0 if record is None else len(record.lost_block_ids or ())
            return f"{text}, lost {plural(num_blocks, 'block')}"
        return text
