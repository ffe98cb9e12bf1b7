"""Lets the requests that the connector reads look as they did when a recorded call read them.

A hook reads more of a request than it records. What it read is worked out here: tokens from chunk keys, known tokens
and tokens in flight from what was settled, the rest from what the scheduler is known to have known.

A key stands for a chunk and everything before it, so the tokens of a chunk are drawn from its key: equal keys give
equal tokens, and thus equal block hashes. The keys that come of them differ from the recorded ones, one for one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from vllm.v1.request import Request

from kvledger.adapters.repro.calls import HookCall
from kvledger.adapters.repro.connector import SchedulerHalf
from kvledger.adapters.repro.recording import Recording
from kvledger.adapters.repro.scheduler import Incarnation, ScheduledTokens, SchedulerModel
from kvledger.lifecycle import events as e


class LiveRequests:
    """Writes into the requests of a connector under test."""

    def __init__(self, recording: Recording, connector: SchedulerHalf, record: SchedulerModel) -> None:
        self._chunk_size = recording.configuration.chunk_size
        self._speculates = recording.speculates
        self._has_windows = any(recording.configuration.windows)
        self._requests = connector.requests
        self._connector = connector
        self._record = record
        self._ahead = recording.wrapped is not None
        """Whether keys count from the first moment on: a recorder notices them later than its wrapped connector."""
        self._keys_of_turns = _keys_of_turns(recording)
        self._rewritten: dict[int, int] = {}
        """Ordinal -> the first chunk whose tokens are other ones since they were last written."""

    def life(self, request_id: str) -> Incarnation | None:
        """The incarnation of a request that the connector knows."""
        return self._record.get(request_id) if request_id in self._requests else None

    def request(self, life: Incarnation) -> Request:
        """VLLM's own object."""
        return self._requests[life.request_id]

    def prompt(self, life: Incarnation) -> list[int]:
        """The tokens with which a request arrives, as the keys say that are observed later."""
        keys = self._keys_of_turn(life)
        if self._ahead:
            life.keys = keys
        return token_ids(str(life.ordinal), keys, range(life.num_prompt_tokens), self._chunk_size)

    def _keys_of_turn(self, life: Incarnation) -> list[bytes]:
        """All keys that are observed of it until its next turn, as a list of its own."""
        turns = self._keys_of_turns.get(life.ordinal)
        return list(turns.pop(0)) if turns else []

    def notice(self, call: HookCall) -> None:
        """As when the call noticed keys and preemptions."""
        for event in call.noticed(e.ChunkKeysObserved):
            life = self._record.get(event.request_id)
            if life is not None and not self._ahead:
                self._rewrite(life, min(len(life.keys), event.first_chunk))
                life.keys[event.first_chunk :] = event.keys
        for preemption in call.noticed(e.RequestPreempted):
            life = self.life(preemption.request_id)
            if life is not None:
                self._preempt(life, preemption)

    def next_turn(self, life: Incarnation, event: e.SessionContinued) -> None:
        """As when a streaming session goes on; keys behind the cut are the new turn's, as the call has noticed them."""
        keys = self._keys_of_turn(life) if self._ahead else life.keys[:]
        self._record.continued(life, event, self._chunk_size)
        life.keys = keys
        self._rewrite(life, event.num_computed_tokens // self._chunk_size)
        request = self.request(life)
        request.num_computed_tokens = event.num_computed_tokens
        request.num_prompt_tokens = event.num_prompt_tokens
        self.write_tokens(life, event.num_tokens)

    def take_back(self, rollbacks: Iterable[e.TokensRolledBack]) -> None:
        """As when vLLM has taken back what followed a failed load."""
        rolled_back = {event.request_id: event.num_computed_tokens for event in rollbacks}
        for life in self._record:
            if life.request_id in rolled_back:
                self._record.rolled_back(life, rolled_back[life.request_id])
            if life.request_id in self._requests:
                self._requests[life.request_id].num_computed_tokens = self._record.num_computed_tokens(life)

    def prepare(self, part: ScheduledTokens, num_settled_tokens: int | None) -> None:
        """As when a step was built, which said that so many tokens were settled, or nothing."""
        life, request = part.life, self.request(part.life)
        request.num_computed_tokens = part.num_computed_tokens
        request.num_in_flight_tokens = self._record.num_tokens_in_flight(life)
        if num_settled_tokens is not None and not self._has_windows:
            request.num_in_flight_tokens = max(0, part.num_computed_tokens - num_settled_tokens)
        estimated = self._as_keyed(life, self._record.num_known_tokens(life))
        self.write_tokens(life, estimated if part.num_tokens is None else part.num_tokens)

    def end(self, life: Incarnation, event: e.RequestFinished) -> None:
        """As when it ended."""
        request = self.request(life)
        self.write_tokens(life, event.num_tokens)
        request.num_in_flight_tokens = 0 if self._speculates else self._record.num_tokens_in_flight(life)
        request.num_computed_tokens = min(event.num_settled_tokens, self._record.num_computed_tokens(life))

    def write_tokens(self, life: Incarnation, num_tokens: int) -> None:
        """Let it have so many tokens, those of the chunks whose keys are known."""
        request = self.request(life)
        first = min(num_tokens, request.num_tokens, self._rewritten.pop(life.ordinal, num_tokens) * self._chunk_size)
        if first == num_tokens == request.num_tokens:
            return
        tokens = token_ids(str(life.ordinal), life.keys, range(first, num_tokens), self._chunk_size)
        self._connector.set_tokens(life.request_id, first, tokens)

    def _rewrite(self, life: Incarnation, first_chunk: int) -> None:
        self._rewritten[life.ordinal] = min(self._rewritten.get(life.ordinal, first_chunk), first_chunk)

    def _preempt(self, life: Incarnation, event: e.RequestPreempted) -> None:
        request = self.request(life)
        request.num_in_flight_tokens = 0
        if self._speculates:
            written = min(self._record.num_computed_tokens(life), event.num_tokens - 1)
            request.num_in_flight_tokens = max(0, written - event.num_settled_tokens)
        self._record.preempted(life, event)
        request.num_preemptions = life.num_preemptions
        request.num_computed_tokens = 0
        self.write_tokens(life, event.num_tokens)

    def _as_keyed(self, life: Incarnation, num_tokens: int) -> int:
        """As many tokens as agree with the chunks whose keys are known."""
        if self._ahead:
            return num_tokens
        least = len(life.keys) * self._chunk_size
        return max(least, min(num_tokens, least + self._chunk_size - 1))


def _keys_of_turns(recording: Recording) -> dict[int, list[list[bytes]]]:
    """By ordinal, for each turn of its session the keys that were observed until the next one."""
    ordinals: dict[str, int] = {}
    found: dict[int, list[list[bytes]]] = {}
    for _, event in recording.observations:
        if isinstance(event, e.RequestArrived):
            ordinals[event.request_id] = event.ordinal
            found[event.ordinal] = [[]]
            continue
        turns = found.get(ordinals.get(getattr(event, "request_id", ""), -1))
        if turns is None:
            continue
        if isinstance(event, e.SessionContinued):
            turns.append(turns[-1][: event.num_computed_tokens // recording.configuration.chunk_size])
        elif isinstance(event, e.ChunkKeysObserved):
            turns[-1][event.first_chunk :] = event.keys
    return found


def token_ids(owner: str, keys: Sequence[bytes], positions: range, chunk_size: int) -> list[int]:
    """The tokens at these positions of a request with these keys; where no key is known, nobody else has them."""
    found: list[int] = []
    for chunk in range(positions.start // chunk_size, -(-positions.stop // chunk_size)):
        seed = b"chunk " + keys[chunk] if chunk < len(keys) else f"nobody else's {owner} {chunk}".encode()
        stream = hashlib.shake_128(seed).digest(2 * chunk_size)
        tokens = [int.from_bytes(stream[2 * place : 2 * place + 2], "little") for place in range(chunk_size)]
        first = max(positions.start - chunk * chunk_size, 0)
        found += tokens[first : positions.stop - chunk * chunk_size]
    return found
