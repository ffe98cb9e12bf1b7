"""Putting pieces of one log into the stream: many under way at once, each only behind the one before it.

The first message of a batch names the stream sequence of its subject's last message, each further one the id of its
predecessor, which must be the last message of the whole stream when it arrives. A message id is a chain hash, so a
message is taken only directly behind the very history it continues, whatever else happens: repeated batches, several
shippers, late packets of a dead connection. If another log's message comes in between, the rest of the batch is
refused, and sent again from where the stream is. docs/decisions says more.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import attrs
import msgspec

from kvledger.storage.events.nats.errors import StreamRefused, StreamUnavailable
from kvledger.storage.events.nats.messages import Piece, message_headers, num_header_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nats.aio.msg import Msg

    from kvledger.storage.events.nats.connection import Connection

__all__ = ["BatchResult", "Publisher", "fits"]

_EXPECTED_SUBJECT_SEQUENCE: Final = "Nats-Expected-Last-Subject-Sequence"
_EXPECTED_LAST_ID: Final = "Nats-Expected-Last-Msg-Id"
_WRONG_LAST_ID: Final = 10070
_WRONG_LAST_SEQUENCE: Final = 10071
_TOO_LARGE: Final = 10054
_NO_RESPONDERS: Final = "503"
_LONGEST_HEADER: Final = {_EXPECTED_LAST_ID: "0" * 32}


class _Error(msgspec.Struct):
    code: int = 0
    err_code: int = 0
    description: str = ""


class _Acknowledgement(msgspec.Struct):
    seq: int = 0
    duplicate: bool = False
    error: _Error | None = None


_decoder = msgspec.json.Decoder(_Acknowledgement)


@attrs.frozen
class BatchResult:
    """How far a batch came: the first `num_stored` pieces are in the stream, the last of them at `stream_sequence`.

    `lost_place`: the next piece was refused, because the stream is not where it was thought to be. The pieces with the
    indices `repeated` were not stored again, because the server remembers their ids. `problem` is what else it had
    against the next piece.
    """

    num_stored: int
    stream_sequence: int
    repeated: frozenset[int] = frozenset()
    lost_place: bool = False
    problem: StreamUnavailable | StreamRefused | None = None


def fits(piece: Piece, max_payload: int) -> bool:
    """Whether the server takes the piece as one message."""
    headers = message_headers(piece) | _LONGEST_HEADER
    return num_header_bytes(headers) + len(piece.data) <= max_payload


class Publisher:
    """Publishes batches over one connection, one batch at a time. Call `open` first."""

    def __init__(self, connection: Connection) -> None:
        """Use this connection."""
        self._connection = connection
        self._inbox = connection.client.new_inbox()
        self._answers: dict[int, _Acknowledgement] = {}
        self._num_expected = 0
        self._batch = 0
        self._subject = ""
        self._denial = ""
        self._complete = asyncio.Event()

    async def open(self) -> None:
        """Listen for acknowledgements."""
        await self._connection.client.subscribe(f"{self._inbox}.*.*", cb=self._on_answer)
        self._connection.on_publish_denied = self._on_denied

    async def publish(self, subject: str, pieces: Sequence[Piece], last_subject_sequence: int) -> BatchResult:
        """Publish pieces that follow each other and the message `last_subject_sequence` (0: the subject is empty).

        Raises:
            StreamUnavailable: the connection ended or the server is silent; look where the stream is.

        """
        self._batch += 1
        self._subject, self._answers, self._denial = subject, {}, ""
        self._num_expected = len(pieces)
        self._complete.clear()
        await self._connection.unless_ended(self._send_and_wait(subject, pieces, last_subject_sequence))
        if self._denial:
            denial = StreamRefused(
                f"{self._connection.address}: {self._denial}; docs/fleet.md lists what must be allowed"
            )
            return BatchResult(0, last_subject_sequence, problem=denial)
        return self._result(len(pieces), last_subject_sequence)

    async def _send_and_wait(self, subject: str, pieces: Sequence[Piece], last_subject_sequence: int) -> None:
        client = self._connection.client
        expected = {_EXPECTED_SUBJECT_SEQUENCE: str(last_subject_sequence)}
        for index, piece in enumerate(pieces):
            headers = message_headers(piece) | expected
            await client.publish(subject, piece.data, reply=f"{self._inbox}.{self._batch}.{index}", headers=headers)
            expected = {_EXPECTED_LAST_ID: piece.message_id}
        num_answers = -1
        while not self._complete.is_set():
            if len(self._answers) == num_answers:
                missing = f"{len(pieces) - num_answers} of {len(pieces)} messages"
                raise StreamUnavailable(
                    f"{self._connection.address}: {missing} were not acknowledged within "
                    f"{self._connection.answer_within_s:g} s"
                )
            num_answers = len(self._answers)
            try:
                await asyncio.wait_for(self._complete.wait(), self._connection.answer_within_s)
            except TimeoutError:
                continue  # As long as answers come in, wait on.

    def _on_denied(self, text: str) -> None:
        # There is one for each message of a batch, so the last ones come when another batch is under way.
        if f'"{self._subject.lower()}"' in text.lower():
            self._denial = text
            self._complete.set()

    async def _on_answer(self, message: Msg) -> None:
        batch, index = message.subject.rsplit(".", 2)[1:]
        if int(batch) != self._batch:
            return  # Of a batch that was given up.
        if message.headers and message.headers.get("Status") == _NO_RESPONDERS:
            answer = _Acknowledgement(
                error=_Error(503, 0, "no stream takes the subject, or the cluster has no leader now")
            )
        else:
            try:
                answer = _decoder.decode(message.data)
            except msgspec.MsgspecError as error:
                answer = _Acknowledgement(error=_Error(503, 0, f"the acknowledgement cannot be read: {error}"))
        self._answers[int(index)] = answer
        if len(self._answers) == self._num_expected:
            self._complete.set()

    def _result(self, num_pieces: int, last_subject_sequence: int) -> BatchResult:
        stream_sequence = last_subject_sequence
        repeated = frozenset(index for index, answer in self._answers.items() if answer.duplicate)
        for index in range(num_pieces):
            answer = self._answers[index]
            if answer.error is not None:
                if answer.error.err_code in {_WRONG_LAST_ID, _WRONG_LAST_SEQUENCE}:
                    return BatchResult(index, stream_sequence, repeated, lost_place=True)
                return BatchResult(index, stream_sequence, repeated, problem=self._problem(answer.error))
            stream_sequence = answer.seq
        return BatchResult(num_pieces, stream_sequence, repeated)

    def _problem(self, error: _Error) -> StreamUnavailable | StreamRefused:
        text = f"{self._connection.address}: {error.description}"
        if error.err_code == _TOO_LARGE:
            return StreamRefused(f"{text}: the stream's max_msg_size is too small for a frame; raise it or make it -1")
        if "maximum" in error.description:
            return StreamUnavailable(
                f"{text}: the stream is full; nothing is dropped, raise its limits or purge old logs"
            )
        return StreamUnavailable(text)
