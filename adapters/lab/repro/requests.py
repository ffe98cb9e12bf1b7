"""Before each call, gives the requests the state that the connector read in the recorded call.

A hook reads more of a request than it records. This module derives the missing state. Token ids come from chunk keys.
The numbers of known tokens and of tokens in flight come from settled tokens. All other state comes from `scheduler.py`,
which reconstructs what the scheduler knew.

A key identifies a chunk and everything before the chunk, so the tokens of a chunk are generated from its key. Equal
keys give equal tokens and therefore equal block hashes. The keys in the rerun differ from the recorded keys, but
correspond to them one to one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from vllm.v1.request import Request

from kvledger.adapters.lab.repro.calls import HookCall
from kvledger.adapters.lab.repro.connector import SchedulerHalf
from kvledger.adapters.lab.repro.recording import Recording
from kvledger.adapters.lab.repro.scheduler import Incarnation, ScheduledTokens, SchedulerModel
from kvledger.lifecycle import events as e


class LiveRequests:
    """Sets the state of the requests of a connector under test."""

    def __init__(self, recording: Recording, connector: SchedulerHalf, record: SchedulerModel) -> None:
        self._chunk_size = recording.configuration.chunk_size
        self._speculates = recording.speculates
        self._has_windows = any(recording.configuration.windows)
        self._requests = connector.requests
        self._connector = connector
        self._record = record
        self._ahead = recording.wrapped is not None
        """Whether a request has all its keys when it arrives. The recorded connector reads keys before the recorder."""
        self._keys_of_turns = _keys_of_turns(recording)
        self._rewritten: dict[int, int] = {}
        """Ordinal → first chunk whose tokens have changed since they were last written."""

    def incarnation(self, request_id: str) -> Incarnation | None:
        """Return the current life of a request id. None if the connector does not know the request."""
        return self._record.get(request_id) if request_id in self._requests else None

    def request(self, incarnation: Incarnation) -> Request:
        """Return vLLM's own `Request` object for a life."""
        return self._requests[incarnation.request_id]

    def prompt(self, incarnation: Incarnation) -> list[int]:
        """Return the prompt of a request that arrives. Its tokens are generated from the chunk keys in later events."""
        keys = self._keys_of_turn(incarnation)
        if self._ahead:
            incarnation.keys = keys
        return token_ids(str(incarnation.ordinal), keys, range(incarnation.num_prompt_tokens), self._chunk_size)

    def _keys_of_turn(self, incarnation: Incarnation) -> list[bytes]:
        """Return a new list of the keys that were observed in one turn. The next call returns the next turn's keys."""
        turns = self._keys_of_turns.get(incarnation.ordinal)
        return list(turns.pop(0)) if turns else []

    def notice(self, call: HookCall) -> None:
        """Apply the chunk keys and the preemptions that a hook call noticed."""
        for event in call.noticed(e.ChunkKeysObserved):
            incarnation = self._record.get(event.request_id)
            if incarnation is not None and not self._ahead:
                self._rewrite(incarnation, min(len(incarnation.keys), event.first_chunk))
                incarnation.keys[event.first_chunk :] = event.keys
        for preemption in call.noticed(e.RequestPreempted):
            incarnation = self.incarnation(preemption.request_id)
            if incarnation is not None:
                self._preempt(incarnation, preemption)

    def next_turn(self, incarnation: Incarnation, event: e.SessionContinued) -> None:
        """Begin the next turn of a streaming session. The chunk keys of this turn are already known."""
        keys = self._keys_of_turn(incarnation) if self._ahead else incarnation.keys[:]
        self._record.continued(incarnation, event, self._chunk_size)
        incarnation.keys = keys
        self._rewrite(incarnation, event.num_computed_tokens // self._chunk_size)
        request = self.request(incarnation)
        request.num_computed_tokens = event.num_computed_tokens
        request.num_prompt_tokens = event.num_prompt_tokens
        self.write_tokens(incarnation, event.num_tokens)

    def take_back(self, rollbacks: Iterable[e.TokensRolledBack]) -> None:
        """Reduce the numbers of computed tokens, as vLLM does after a failed load."""
        rolled_back = {event.request_id: event.num_computed_tokens for event in rollbacks}
        for incarnation in self._record:
            if incarnation.request_id in rolled_back:
                self._record.rolled_back(incarnation, rolled_back[incarnation.request_id])
            if incarnation.request_id in self._requests:
                self._requests[incarnation.request_id].num_computed_tokens = self._record.num_computed_tokens(
                    incarnation
                )

    def prepare(self, part: ScheduledTokens, settled: e.SettledTokens | None) -> None:
        """Set the state of one request for a step.

        Args:
            part: the request's part of the step.
            settled: the settled tokens that the step recorded for the request; None if it recorded none.
        """
        incarnation, request = part.incarnation, self.request(part.incarnation)
        request.num_computed_tokens = part.num_computed_tokens
        request.num_in_flight_tokens = self._record.num_tokens_in_flight(incarnation)
        if settled is not None and settled.num_in_flight_tokens != e.NOT_RECORDED:
            request.num_in_flight_tokens = settled.num_in_flight_tokens
        elif settled is not None and not self._has_windows:
            request.num_in_flight_tokens = max(0, part.num_computed_tokens - settled.num_settled_tokens)
        estimated = self._as_keyed(incarnation, self._record.num_known_tokens(incarnation))
        self.write_tokens(incarnation, estimated if part.num_tokens is None else part.num_tokens)

    def end(self, incarnation: Incarnation, event: e.RequestFinished) -> None:
        """Set the state that a request has when it finishes."""
        request = self.request(incarnation)
        self.write_tokens(incarnation, event.num_tokens)
        request.num_in_flight_tokens = 0 if self._speculates else self._record.num_tokens_in_flight(incarnation)
        request.num_computed_tokens = min(event.num_settled_tokens, self._record.num_computed_tokens(incarnation))
        if event.num_in_flight_tokens != e.NOT_RECORDED:
            request.num_in_flight_tokens = event.num_in_flight_tokens
        if event.num_computed_tokens != e.NOT_RECORDED:
            request.num_computed_tokens = event.num_computed_tokens

    def write_tokens(self, incarnation: Incarnation, num_tokens: int) -> None:
        """Give a request `num_tokens` tokens. Chunks with a known key get the key's tokens, others arbitrary tokens."""
        request = self.request(incarnation)
        first = min(
            num_tokens, request.num_tokens, self._rewritten.pop(incarnation.ordinal, num_tokens) * self._chunk_size
        )
        if first == num_tokens == request.num_tokens:
            return
        tokens = token_ids(str(incarnation.ordinal), incarnation.keys, range(first, num_tokens), self._chunk_size)
        self._connector.set_tokens(incarnation.request_id, first, tokens)

    def _rewrite(self, incarnation: Incarnation, first_chunk: int) -> None:
        self._rewritten[incarnation.ordinal] = min(self._rewritten.get(incarnation.ordinal, first_chunk), first_chunk)

    def _preempt(self, incarnation: Incarnation, event: e.RequestPreempted) -> None:
        request = self.request(incarnation)
        request.num_in_flight_tokens = 0
        if self._speculates:
            written = min(self._record.num_computed_tokens(incarnation), event.num_tokens - 1)
            request.num_in_flight_tokens = max(0, written - event.num_settled_tokens)
        if event.num_in_flight_tokens != e.NOT_RECORDED:
            request.num_in_flight_tokens = event.num_in_flight_tokens
        self._record.preempted(incarnation, event)
        request.num_preemptions = incarnation.num_preemptions
        request.num_computed_tokens = 0
        self.write_tokens(incarnation, event.num_tokens)

    def _as_keyed(self, incarnation: Incarnation, num_tokens: int) -> int:
        """Return `num_tokens`, adjusted so that the request has as many whole chunks as it has known keys."""
        if self._ahead:
            return num_tokens
        least = len(incarnation.keys) * self._chunk_size
        return max(least, min(num_tokens, least + self._chunk_size - 1))


def _keys_of_turns(recording: Recording) -> dict[int, list[list[bytes]]]:
    """Return ordinal → for each turn of the request's session, the chunk keys that were observed in the turn."""
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
    """Return a request's tokens at these positions. Chunks without a known key get tokens that no other request has."""
    found: list[int] = []
    for chunk in range(positions.start // chunk_size, -(-positions.stop // chunk_size)):
        seed = b"chunk " + keys[chunk] if chunk < len(keys) else f"nobody else's {owner} {chunk}".encode()
        first = max(positions.start - chunk * chunk_size, 0)
        end = min(positions.stop - chunk * chunk_size, chunk_size)
        stream = hashlib.shake_128(seed).digest(2 * end)
        found += [int.from_bytes(stream[2 * place : 2 * place + 2], "little") for place in range(first, end)]
    return found
