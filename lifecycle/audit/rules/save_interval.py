"""Save interval: how soon the settled tokens of a decoding request are saved."""

from __future__ import annotations

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Checker
from kvledger.lifecycle.audit.model import AuditModel
from kvledger.lifecycle.marks import on
from kvledger.lifecycle.reader.forgotten import LIFE
from kvledger.lifecycle.reader.moment import num_intact_tokens
from kvledger.lifecycle.reader.records import Life
from kvledger.lifecycle.states import BlocksRegion

_NUM_STEPS = 8
"""Number of steps after which the tokens of a step have settled. It is more than vLLM has in flight at a time."""


class SaveInterval(Checker):
    """SAVE_INTERVAL: settled chunks of a decoding request are recorded for saving at the end of each save interval.

    A chunk within the prompt is recorded for saving as soon as all of its tokens are settled. Later chunks are recorded
    as soon as all tokens of a save interval (`save_interval_tokens`, rounded up to whole chunks) are settled.

    Verifies: whether chunks were recorded in time. This is checked at each event with a request's settled tokens: at
    steps, and when a request is preempted or finishes. A request is checked only if it has decoded for more than eight
    steps in a row. The tokens of the last eight steps do not count.
    Does not verify: requests that decode several tokens per step, are quarantined, or have KV from before a reset;
    chunks whose key was never known; the last chunks of a request that still decodes when the log ends.
    """

    rule = "SAVE_INTERVAL"

    def __init__(self, model: AuditModel) -> None:
        super().__init__(model)
        self._loaded: dict[str, int] = {}
        """Request id → number of steps when a load was last settled. During a load no settled tokens are recorded."""
        chunk_size = self.configuration.chunk_size
        self._interval_chunks = max(1, -(-self.configuration.save_interval_tokens // chunk_size))
        model.forgotten.at(LIFE, self._loaded)

    def begin(self) -> None:
        """Treat the last load of each request as just settled, because the step in which it settled is not known."""
        self._loaded.update((life.request_id, self.lives.num_steps) for life in self.lives)

    @on(e.LoadCompleted, e.LoadFailed)
    def _load_settled(self, event: e.LoadCompleted | e.LoadFailed) -> None:
        self._loaded[event.request_id] = self.lives.num_steps

    @on(e.StepScheduled)
    def _step_scheduled(self, event: e.StepScheduled) -> None:
        for ordinal, _, num_settled_tokens, _ in event.settled:
            life = self.lives.of(ordinal)
            if life is not None and not life.is_stale and life.blocks is not BlocksRegion.LOADING:
                self._check(life, self.lives.num_steps_decoding(life), num_settled_tokens)

    @on(e.RequestPreempted, e.RequestFinished)
    def _stopped(self, event: e.RequestPreempted | e.RequestFinished) -> None:
        life, moment = self.moment.life, self.moment
        if life is None or moment.was_stale or moment.blocks_before is BlocksRegion.LOADING:
            return
        num_tokens = min(num_intact_tokens(event), len(life.keys) * self.configuration.chunk_size)
        self._check(life, moment.num_steps_decoded, num_tokens)

    def _check(self, life: Life, num_steps: int, num_tokens: int) -> None:
        num_steps = min(num_steps, self.lives.num_steps - self._loaded.get(life.request_id, 0))
        if num_steps <= _NUM_STEPS or life.quarantined:
            return
        chunk_size = self.configuration.chunk_size
        first_chunk = life.settled_before // chunk_size
        threshold = (first_chunk + 1) * chunk_size
        if threshold > life.num_prompt_tokens:
            threshold = (first_chunk // self._interval_chunks + 1) * self._interval_chunks * chunk_size
        if num_tokens - _NUM_STEPS >= threshold:
            detail = (
                f"chunk {first_chunk} was not saved or declined when {threshold} tokens were settled: now "
                f"{num_tokens} are settled, and {num_tokens - _NUM_STEPS} were settled {_NUM_STEPS} steps ago"
            )
            self.broken(detail, request_id=life.request_id)
