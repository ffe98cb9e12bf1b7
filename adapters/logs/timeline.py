"""The life of one request as groups of events: an observation with all that was decided on it, told in words.

Steps in which a request only computes and saves are gathered into one group, and so are equal lookups.
"""

from __future__ import annotations

import attrs

from kvledger.adapters.logs.amounts import duration, plural, size
from kvledger.adapters.logs.describe import describe, describe_decisions
from kvledger.adapters.logs.log import Gap
from kvledger.lifecycle import Core, LedgerConfiguration, Projections, RequestState, SequencedEvent
from kvledger.lifecycle import events as e
from kvledger.lifecycle.windows import NO_SLOT

_QUIET_DECISIONS = (e.SaveIssued, e.PrefillAdvanced, e.PrefillCompleted)
"""Decisions on a step that do not deserve a line of their own."""
_NO_ANSWER = "asked what can be loaded; the log has no answer"


@attrs.define
class Group:
    """Events that are told together. Times in nanoseconds since the log was opened."""

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
    num_chunks_saved: int = 0
    num_tokens_of_tail: int = 0
    """Tokens of the part-filled last chunk that are saved here, or loaded."""
    num_bytes: int = 0
    duration_ns: int = 0
    """Time that transfers took, added up over their reports."""
    num_broken: int = 0
    """Rules that were broken here."""

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
            if self.num_chunks_saved:
                parts.append(f"saved {plural(self.num_chunks_saved, 'chunk')}")
        elif self.what == "lookup" and self.num_moments > 1:
            parts[0] += f" — {self.num_moments} times"
        if self.num_bytes:
            parts.append(f"{size(self.num_bytes)} in {duration(self.duration_ns)}")
        return "; ".join(parts)


@attrs.define
class _Moment:
    """An observation, and what was so before it."""

    sequence: int
    event: e.Event
    state_before: str | None
    num_computed_before: int
    decisions: list[SequencedEvent] = attrs.field(factory=list)


def known(core: Core, configuration: LedgerConfiguration) -> Projections:
    """The projections that a life is told from: each makes a request's part from that request's own events alone.

    So what happened before the request arrived may be left out; the host pool, which everybody shares, is not here.
    """
    return Projections(core, configuration, only=("extensions", "sub_states", "tracker", "blocks", "tails"))


class Timeline:
    """Folds a log and keeps the groups of one request id, through all its lives."""

    def __init__(self, configuration: LedgerConfiguration, request_id: str, known: Projections) -> None:
        """`known` may be shared by several timelines; then each looks at an event before it is folded there."""
        self.request_id = request_id
        self.groups: list[Group] = []
        self._num_ranks = configuration.num_ranks
        self._known = known
        self._core = known.core
        self._tracker = self._known.tracker
        self._moment: _Moment | None = None
        self._jobs: dict[int, e.LoadIssued | e.SaveIssued | e.TailSaveIssued] = {}
        self._from_tail: dict[int, int] = {}
        """Id of a load -> tokens that it reads from the request's saved tail."""
        self._num_lives = 0

    def take(self, sequence: int, event: e.Event) -> None:
        """Take up the next event of the log."""
        self.look(sequence, event)
        self._known.fold(event, sequence)

    def look(self, sequence: int, event: e.Event) -> None:
        """The same where somebody else folds what is known, right after this."""
        if not event.is_decision:
            self._close()
            record = self._tracker.get(self.request_id)
            num_computed = 0 if record is None else self._tracker.num_computed_tokens(record)
            self._moment = _Moment(sequence, event, None if record is None else record.path, num_computed)
        elif self._moment is not None and self._concerns(event):
            self._moment.decisions.append((sequence, event))
            if isinstance(event, e.LoadIssued | e.SaveIssued | e.TailSaveIssued):
                self._jobs[event.job_id] = event
            if isinstance(event, e.LoadIssued):
                self._from_tail[event.job_id] = self._num_tokens_from_tail(event)

    def lose(self, gap: Gap) -> None:
        """Say that events are missing here."""
        self._close()
        now = self._tracker.time_ns
        text = f"events {gap.first_sequence}–{gap.last_sequence} are missing; what follows is described without them"
        self.groups.append(Group("lost", gap.first_sequence, gap.last_sequence, now, now, None, None, None, [text]))

    def finish(self) -> None:
        """Take up the last observation."""
        self._close()

    def _concerns(self, event: e.Event) -> bool:
        if isinstance(event, e.ExtensionStopped):
            return self._moment is not None and self._moment.state_before is not None
        if isinstance(event, e.ChunkTainted):
            return self._moment is not None and bool(self._moment.decisions)
        return getattr(event, "request_id", None) == self.request_id

    def _num_tokens_from_tail(self, load: e.LoadIssued) -> int:
        record = self._tracker.get(self.request_id)
        tail = None if record is None else self._known.tails.saved(record.ordinal)
        if tail is None or (set(tail.slots) - {NO_SLOT}).isdisjoint(load.slots):
            return 0
        return load.first_token + load.num_tokens - max(tail.first_token, load.first_token)

    # --- from a moment to a group -------------------------------------------------------------

    def _close(self) -> None:
        moment, self._moment = self._moment, None
        if moment is None:
            return
        if isinstance(moment.event, e.StepScheduled):
            self._close_step(moment, moment.event)
        elif isinstance(moment.event, e.TransferReported) and moment.event.job_id in self._jobs:
            self._close_report(moment, moment.event)
        elif getattr(moment.event, "request_id", None) == self.request_id:
            self._close_request_event(moment)
        elif moment.state_before is not None and isinstance(moment.event, e.CacheReset | e.LogNote):
            self._add(moment, moment.event.id, self._observation_text(moment.event))
        elif moment.decisions:  # upon what concerns others
            self._add(moment, moment.decisions[0][1].id, "")

    def _close_step(self, moment: _Moment, event: e.StepScheduled) -> None:
        record = self._tracker.get(self.request_id)
        if record is None or moment.state_before is None:
            return
        num_computed = self._tracker.num_computed_tokens(record)
        num_blocks = sum(len(block_ids) for ordinal, block_ids in event.extended if ordinal == record.ordinal)
        scheduled = any(ordinal == record.ordinal for ordinal, *_ in event.advanced)
        if not (moment.decisions or num_blocks or scheduled or num_computed != moment.num_computed_before):
            return
        what = "decode" if moment.state_before.partition(".")[0] == RequestState.RUNNING else "prefill"
        group = self._continued(what, moment)
        if group is None:
            group = self._add(moment, what, "")
            group.first_token = next(
                (first for ordinal, first, *_ in event.advanced if ordinal == record.ordinal),
                moment.num_computed_before,
            )
        group.num_tokens = num_computed - group.first_token
        group.num_blocks += num_blocks
        decisions = [decision for _, decision in moment.decisions]
        group.num_chunks_saved += sum(len(d.chunks) for d in decisions if isinstance(d, e.SaveIssued))
        loud = (decision for decision in decisions if not isinstance(decision, _QUIET_DECISIONS))
        group.texts += describe_decisions(loud, self._core)

    def _close_report(self, moment: _Moment, event: e.TransferReported) -> None:
        job = self._jobs[event.job_id]
        settled = [decision for _, decision in moment.decisions]
        last = self.groups[-1] if self.groups else None
        is_quiet = not isinstance(job, e.LoadIssued) and all(isinstance(d, e.SaveCompleted) for d in settled)
        if is_quiet and not event.ranks_failed and last is not None and last.what in {"prefill", "decode"}:
            last.last_sequence = moment.decisions[-1][0] if moment.decisions else moment.sequence
        else:
            last = self._add(moment, "transfer", "")
            if not settled:
                kind = "load" if isinstance(job, e.LoadIssued) else "save"
                last.texts.append(
                    f"{plural(len(event.ranks_done), 'rank')} of {self._num_ranks} did {kind} {event.job_id}"
                )
            last.num_tokens = job.num_tokens if isinstance(job, e.LoadIssued) else 0
        last.num_bytes += event.num_bytes
        last.duration_ns += event.duration_ns
        if any(isinstance(d, e.LoadCompleted | e.LoadFailed | e.SaveCompleted | e.SaveFailed) for d in settled):
            del self._jobs[event.job_id]

    def _close_request_event(self, moment: _Moment) -> None:
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

    def _close_lookup(self, moment: _Moment) -> None:
        """Somebody else's answer has an event of its own, behind the question's; then the two are one."""
        asked = self.groups.pop() if self.groups and self.groups[-1].texts == [_NO_ANSWER] else None
        before = self.groups[-1] if self.groups else None
        group = self._add(moment, "lookup", self._observation_text(moment.event))
        group.texts = group.texts or [_NO_ANSWER]
        if asked is not None:
            group.first_sequence, group.time_ns, group.state_before = (
                asked.first_sequence,
                asked.time_ns,
                asked.state_before,
            )
        if before is not None and before.what == "lookup" and before.texts == group.texts:
            self.groups.pop()
            before.num_moments += 1
            before.last_sequence, before.until_ns = group.last_sequence, group.until_ns

    def _continued(self, what: str, moment: _Moment) -> Group | None:
        """The last group, if this step only goes on with it."""
        last = self.groups[-1] if self.groups else None
        if last is None or last.what != what or last.state_after != moment.state_before:
            return None
        if not all(isinstance(decision, _QUIET_DECISIONS) for _, decision in moment.decisions):
            return None
        last.num_moments += 1
        last.last_sequence = moment.decisions[-1][0] if moment.decisions else moment.sequence
        last.until_ns = self._tracker.time_ns
        record = self._tracker.get(self.request_id)
        last.state_after = None if record is None else record.path
        return last

    def _add(self, moment: _Moment, what: str, text: str) -> Group:
        record = self._tracker.get(self.request_id)
        decisions = [decision for _, decision in moment.decisions]
        texts = [text] if text else []
        if what not in {"prefill", "decode"}:
            texts += describe_decisions(decisions, self._core)
        group = Group(
            what,
            moment.sequence,
            moment.decisions[-1][0] if moment.decisions else moment.sequence,
            getattr(moment.event, "time_ns", self._tracker.time_ns),
            getattr(moment.event, "time_ns", self._tracker.time_ns),
            moment.state_before,
            None if record is None else record.path,
            None if record is None else record.generation,
            texts,
            num_broken=sum(isinstance(d, e.InvariantViolated) for d in (moment.event, *decisions)),
        )
        for decision in decisions:
            if isinstance(decision, e.TailSaveIssued):
                group.num_tokens_of_tail += decision.num_tokens
            elif isinstance(decision, e.LoadIssued) and (num_tokens := self._from_tail.pop(decision.job_id, 0)):
                group.num_tokens_of_tail += num_tokens
                group.texts.append(f"the last {plural(num_tokens, 'token')} of it from its saved tail")
        self.groups.append(group)
        return group

    def _observation_text(self, event: e.Event) -> str:
        text = describe(event, self._core)
        if not text and not isinstance(event, e.LookupRequested | e.ExtensionObserved):
            text = event.id
        if isinstance(event, e.RequestArrived):
            self._num_lives += 1
            return text if self._num_lives == 1 else f"{text}, life {self._num_lives} of this id"
        if isinstance(event, e.RequestPreempted):
            num_blocks = len(self._known.blocks.lost(self.request_id))
            return f"{text}, lost {plural(num_blocks, 'block')}"
        return text
