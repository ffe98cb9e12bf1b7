"""A TCP proxy on loopback whose network can be cut: connections dropped, or left open with nothing coming through."""

from __future__ import annotations

import contextlib
import socket
import threading

_CHUNK_BYTES = 1 << 16


class Proxy:
    """Forwards to a port of loopback, in threads, until it is told to break."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        self._is_open = True
        self._is_black_hole = threading.Event()
        self._bytes_until_cut: int | None = None
        self.num_connections = 0
        self.num_cuts = 0
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"nats://127.0.0.1:{self.port}"

    def drop(self) -> None:
        """Reset every connection there is."""
        with self._lock:
            sockets, self._sockets = self._sockets, []
            self.num_cuts += 1
        for one in sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def cut_after(self, num_bytes: int | None) -> None:
        """Drop all connections each time `num_bytes` went towards the server; None: never again."""
        self._bytes_until_cut = self._cut_every = num_bytes

    def swallow(self) -> None:
        """From now on take bytes and pass nothing on: a black hole, the connections stay open."""
        self._is_black_hole.set()

    def pass_on(self) -> None:
        """End `swallow`. What was swallowed is lost, so connections that were open are dropped."""
        self._is_black_hole.clear()
        self.drop()

    def close(self) -> None:
        """Stop listening, and drop all."""
        self._is_open = False
        self._listener.close()
        self.drop()

    def _accept(self) -> None:
        while self._is_open:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target_port))
            except OSError:
                if self._is_open:
                    with contextlib.suppress(UnboundLocalError, OSError):
                        client.close()
                continue
            self.num_connections += 1
            with self._lock:
                self._sockets += [client, server]
            threading.Thread(target=self._forward, args=(client, server, True), daemon=True).start()
            threading.Thread(target=self._forward, args=(server, client, False), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, is_upstream: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK_BYTES):
                if self._is_black_hole.is_set():
                    continue
                if is_upstream and self._is_due(len(data)):
                    sink.sendall(data[: len(data) // 2])  # in the middle of something
                    self.drop()
                    return
                sink.sendall(data)
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _is_due(self, num_bytes: int) -> bool:
        with self._lock:
            if self._bytes_until_cut is None:
                return False
            self._bytes_until_cut -= num_bytes
            if self._bytes_until_cut > 0:
                return False
            self._bytes_until_cut = self._cut_every
            return True
