"""Finds in a recorder's log which chunks the recorded connector's workers saved, and which chunks it offered.

A recorded connector does not report evictions, and it divides tokens in its own way. The log therefore shows less about
its chunks than about kvledger's own chunks. If a copy cannot be assigned to tokens, the reasons are less precise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from kvledger.adapters.recorded import payloads
from kvledger.adapters.tools.reasons.chunk_history import ChunkFact, ChunkHistory, ChunkStatus
from kvledger.lifecycle import MissReason, on
from kvledger.lifecycle import events as e
from kvledger.lifecycle.ranges import MAX_INT64
from kvledger.lifecycle.reader import Life, Model, marked, num_intact_tokens

MAX_UNDER_WAY = 4096
"""Number of jobs in flight to remember. A connector may never report the end of a job. If there are more jobs, the
oldest are forgotten, and their chunks stay `SAVING`."""


class Save(msgspec.Struct):
    """A save in flight."""

    sequence: int
    """Sequence number of the event that handed the save to the workers. Used as job id, because the connector's own job
    id is text."""
    request_id: str
    ordinal: int
    ends_with: str
    keys: list[bytes]


class State(msgspec.Struct, forbid_unknown_fields=True):
    """State of `RecordedChunks`, as plain values."""

    is_recorder: bool = False
    """Whether a recorder wrote the log."""
    lacks_saves: bool = False
    """Whether the workers got saves that cannot be assigned to tokens."""
    has_prefix_cache: bool = False
    """Whether vLLM's own prefix cache is on."""
    unit_tokens: int = 0
    """Number of tokens that the connector saves or finds together; 0: unknown."""
    reset_at: int = 0
    """Sequence number of the last event that emptied vLLM's prefix cache; 0: none."""
    saves: dict[str, list[Save]] = {}
    """Job → its saves."""
    awaited: list[str] = []
    """Jobs that the workers must complete before the step that vLLM is scheduling computes anything."""
    nameless: dict[int, dict[int, ChunkFact]] = {}
    """Ordinal of a life → number of a chunk → latest fact, for chunks that were saved before the log had their keys."""

    def forget(self) -> None:
        """Forget the saves in flight, because the missing events may have begun or ended saves."""
        self.lacks_saves = True
        self.saves.clear()
        self.nameless.clear()


class RecordedChunks:
    """Part of `Accounts` that gets a recorder's events, and other events about the recorded connector's chunks."""

    def __init__(self, model: Model, chunks: Callable[[], ChunkHistory], state: Callable[[], State]) -> None:
        self._model, self._moment = model, model.moment
        self._chunks, self._state = chunks, state
        windows = model.configuration.windows
        self._num_groups = len(windows)
        self._group = next((group for group, window in enumerate(windows) if not window), 0)
        """Index of the KV cache group whose copies count: the first group without a window. The other groups copy the
        same chunks."""
        self._chunk_size = model.configuration.chunk_size
        self._takes: dict[type[Any], Callable[[Any], None]] = dict(marked(self))

    @on(e.ExtensionObserved, e.ExtensionNoted)
    def _recorded(self, event: e.ExtensionObserved | e.ExtensionNoted) -> None:
        payload = payloads.payload_of(event)
        take = None if payload is None else self._takes.get(type(payload))
        if take is not None:
            take(payload)

    # --- what the recorder says ------------------------------------------------------------------

    @on(payloads.RecordingStarted)
    def _started(self, started: payloads.RecordingStarted) -> None:
        state = self._state()
        state.is_recorder = True
        state.has_prefix_cache = started.enable_prefix_caching
        state.unit_tokens = started.unit_tokens(self._model.configuration.block_size)

    @on(payloads.MetadataSeen)
    def _metadata_seen(self, seen: payloads.MetadataSeen) -> None:
        self._state().lacks_saves |= not seen.is_decoded

    @on(payloads.Undecoded)
    def _undecoded(self, _undecoded: payloads.Undecoded) -> None:
        self._state().lacks_saves = True

    @on(payloads.Transferred)
    def _handed(self, copy: payloads.Transferred) -> None:
        life = self._moment.life
        if copy.is_load or copy.group not in {-1, self._group}:
            return
        places = None if life is None else self._places(copy, life)
        if life is None or places is None:
            self._state().lacks_saves = True
            return
        state, sequence = self._state(), self._moment.sequence
        is_under_way = bool(copy.ends_with) and copy.job not in state.awaited
        status = ChunkStatus.SAVING if is_under_way else ChunkStatus.SAVED
        fact = ChunkFact(status, sequence, life.request_id, life.ordinal, sequence, cause=sequence)
        keys = [life.keys[place] for place in places if place < len(life.keys)]
        self._chunks().save_issued(keys, fact)
        self._chunks().forget_oldest()
        nameless = {place: fact for place in places if place >= len(life.keys)}
        if nameless:
            state.nameless.setdefault(life.ordinal, {}).update(nameless)
        if is_under_way:
            save = Save(sequence, life.request_id, life.ordinal, copy.ends_with, keys)
            state.saves.setdefault(copy.job, []).append(save)
            if len(state.saves) > MAX_UNDER_WAY:
                del state.saves[next(iter(state.saves))]

    @on(payloads.TransferredFor)
    def _handed_for(self, handed: payloads.TransferredFor) -> None:
        if not handed.copy.is_load:  # the log does not have the tokens
            self._state().lacks_saves = True

    def _places(self, copy: payloads.Transferred, life: Life) -> list[int] | None:
        """Return the numbers of the chunks that a save reads; None if the request lacks a block that the save reads."""
        table: Sequence[int] = self._model.tables.of(life.ordinal) or self._model.tables.lost_by(life)
        if not table:
            first, end = copy.first_block, copy.first_block + len(copy.block_ids)
            return list(range(first, end)) if first >= 0 and end <= MAX_INT64 else None
        of_group = copy.group >= 0
        found = list(copy.places(table[copy.group :: self._num_groups] if of_group else table))
        if None in found:
            return None
        places = [place for place in found if place is not None]
        return places if of_group else sorted({place // self._num_groups for place in places})

    @on(payloads.TransfersAwaited)
    def _awaited(self, awaited: payloads.TransfersAwaited) -> None:
        self._state().awaited = list(awaited.jobs)
        self._ended(awaited)

    @on(payloads.TransfersEnded)
    def _ended(self, ended: payloads.TransfersAwaited | payloads.TransfersEnded) -> None:
        jobs = frozenset(ended.jobs)
        self._end(lambda job, _save: job in jobs)

    @on(payloads.ReportedToVLLM)
    def _reported(self, ends: payloads.ReportedToVLLM) -> None:
        sent = frozenset(ends.finished_sending)
        if sent:
            self._end(lambda _job, save: save.ends_with == payloads.REQUEST and save.request_id in sent)

    # --- what the core's events say --------------------------------------------------------------

    @on(e.StepScheduled)
    def _stepped(self, _event: e.StepScheduled) -> None:
        state = self._state()
        state.awaited = []
        if state.saves:
            self._end(lambda _job, save: save.ends_with == payloads.STEP)

    @on(e.ChunkKeysObserved)
    def _named(self, _event: e.ChunkKeysObserved) -> None:
        state, life = self._state(), self._moment.life
        nameless = None if life is None else state.nameless.get(life.ordinal)
        if life is None or not nameless:
            return
        for place in [place for place in nameless if place < len(life.keys)]:
            fact = nameless.pop(place)
            self._chunks().save_issued((life.keys[place],), fact)
            for save in self._under_way():
                if save.sequence == fact.sequence:
                    save.keys.append(life.keys[place])

    @on(e.LookupAnswered)
    def _offered(self, event: e.LookupAnswered) -> None:
        life = self._model.lives.of(event.ordinal)
        if life is None or event.miss_reason != MissReason.RECORDED or not event.num_external_tokens:
            return
        first, end = event.num_computed_tokens // self._chunk_size, event.num_hit_tokens // self._chunk_size
        sequence = self._moment.sequence
        fact = ChunkFact(ChunkStatus.OFFERED, sequence, life.request_id, life.ordinal, cause=event.cause)
        self._chunks().offered(life.keys[first:end], fact)
        self._chunks().forget_oldest()

    @on(e.PrefixCacheReset, e.CacheReset)
    def _reset(self, _event: e.Event) -> None:
        self._state().reset_at = self._moment.sequence

    @on(e.RequestFinished)
    def _finished(self, event: e.RequestFinished) -> None:
        """Renew facts about unsaved chunks that this request computed, if the facts are older than the last reset."""
        state, life = self._state(), self._moment.life
        if life is None or not state.reset_at or not state.is_recorder:
            return
        computed = life.keys[: max(0, num_intact_tokens(event)) // self._chunk_size]
        self._chunks().known_again(computed, state.reset_at, self._moment.sequence, life)

    def forget(self, ordinal: int) -> None:
        """Forget a life that has ended."""
        self._state().nameless.pop(ordinal, None)

    # --- copies ----------------------------------------------------------------------------------

    def _under_way(self) -> Iterator[Save]:
        for saves in self._state().saves.values():
            yield from saves

    def _end(self, is_over: Callable[[str, Save], bool]) -> None:
        state, sequence = self._state(), self._moment.sequence
        for job, saves in tuple(state.saves.items()):
            over = [save for save in saves if is_over(job, save)]
            if len(over) == len(saves):
                del state.saves[job]
            elif over:
                state.saves[job] = [save for save in saves if not is_over(job, save)]
            for save in over:
                self._chunks().save_settled(save.keys, save.sequence, ChunkStatus.SAVED, sequence, sequence, "")
                nameless = state.nameless.get(save.ordinal, {})
                for place, fact in nameless.items():
                    if fact.sequence == save.sequence:
                        nameless[place] = fact.settled(ChunkStatus.SAVED, sequence, sequence)
