"""A router's end of vLLM's ZMQ publisher: a subscription, and the replay of what was sent before it held."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import zmq
from vllm.distributed.kv_events import KVEventBatch, ZmqEventPublisher


class Feed:
    """Batches in order, none left out (`distributed/kv_events.py`, ZmqEventPublisher)."""

    def __init__(self, context: zmq.Context[Any]) -> None:
        self._live, self._replay = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        self._live.setsockopt(zmq.SUBSCRIBE, b"")
        with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
            port, replay_port = one.getsockname()[1], other.getsockname()[1]
        self._live.connect(f"tcp://127.0.0.1:{port}")
        self._replay.connect(f"tcp://127.0.0.1:{replay_port}")
        self._decode = msgspec.msgpack.Decoder(KVEventBatch).decode
        self._next_sequence = 0
        self.configuration = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{port}",
            "replay_endpoint": f"tcp://127.0.0.1:{replay_port}",
        }
        """Values of `--kv-events-config`."""

    def read(self, take: Callable[[KVEventBatch], None], is_last: Callable[[], bool]) -> None:
        """Give batches to `take` until that was the last one; waits for as long as it takes."""
        while not is_last():
            if self._live.poll(200):
                _, sequence, payload = self._live.recv_multipart()
                if int.from_bytes(sequence) < self._next_sequence:
                    continue
                if int.from_bytes(sequence) == self._next_sequence:
                    self._pass_on(payload, take)
                    continue
            self._read_again(take)

    def _read_again(self, take: Callable[[KVEventBatch], None]) -> None:
        """What was sent meanwhile, and did not come: the subscription is not there from the start."""
        self._replay.send_multipart((b"", self._next_sequence.to_bytes(8)))
        while True:
            *_, sequence, payload = self._replay.recv_multipart()
            if sequence == ZmqEventPublisher.END_SEQ:
                return
            self._pass_on(payload, take)

    def _pass_on(self, payload: bytes, take: Callable[[KVEventBatch], None]) -> None:
        take(self._decode(payload))
        self._next_sequence += 1


@contextmanager
def feed() -> Iterator[Feed]:
    """One that is there before the publisher is."""
    context = zmq.Context()
    try:
        yield Feed(context)
    finally:
        context.destroy(linger=0)
