"""One nats-server process with JetStream on loopback; it can be killed and started again over the same files."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import TypeVar

import nats
from nats.js import JetStreamContext
from processes import wait_until

Answer = TypeVar("Answer")


def find_nats_server() -> str | None:
    """The server's path. Debian installs it where only root's PATH looks."""
    return shutil.which("nats-server", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


def free_port() -> int:
    """A port of loopback that nobody uses at this moment."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def start_cluster(directory: Path, num_servers: int = 3) -> list[NatsServer]:
    """Start servers that know each other and replicate streams."""
    ports = [free_port() for _ in range(num_servers)]
    routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in ports)
    servers = [
        NatsServer(
            directory / f"server-{number}",
            f'server_name: "{number}"\ncluster {{ name: test, listen: "127.0.0.1:{port}", routes: [{routes}] }}',
        )
        for number, port in enumerate(ports)
    ]
    try:
        for server in servers:
            server.start()
    except BaseException:
        for server in servers:
            server.kill()
        raise
    return servers


class NatsServer:
    """A server that keeps its streams in `directory`. `configuration` is text in its configuration language."""

    def __init__(self, directory: Path, configuration: str = "") -> None:
        self.directory = directory
        self.port = free_port()
        self.configuration = configuration
        self._process: subprocess.Popen[bytes] | None = None
        self._has_run = False
        self._num_ports_left = 3

    @property
    def url(self) -> str:
        """Where it listens; a stream's name may follow."""
        return f"nats://127.0.0.1:{self.port}"

    def start(self) -> NatsServer:
        """Start it, and return when it answers. A first start that finds its port taken by now takes another."""
        while not self._start():
            assert not self._has_run, (self.directory / "server.log").read_text()
            assert self._num_ports_left, (self.directory / "server.log").read_text()
            self._num_ports_left -= 1
            self.port = free_port()
        self._has_run = True
        return self

    def _start(self) -> bool:
        binary = find_nats_server()
        assert binary is not None
        self.directory.mkdir(parents=True, exist_ok=True)
        configuration = self.directory / "server.conf"
        configuration.write_text(
            f'listen: "127.0.0.1:{self.port}"\njetstream {{ store_dir: "{self.directory}" }}\n{self.configuration}\n'
        )
        with (self.directory / "server.log").open("ab") as log:
            self._process = subprocess.Popen([binary, "-c", str(configuration)], stdout=log, stderr=log)
        try:
            wait_until(lambda: self._answers() or not self._runs())
        except BaseException:  # also a test's own time limit: nobody else knows this process yet
            self.kill()
            raise
        return self._runs()

    def kill(self) -> None:
        """`kill -9`: nothing is flushed, nobody is told."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def asked(self, ask: Callable[[JetStreamContext], Awaitable[Answer]]) -> Answer:
        """What JetStream answers to the client library alone."""

        async def run() -> Answer:
            async with await nats.connect(self.url) as client:
                return await ask(client.jetstream())

        return asyncio.run(run())

    def make_stream(self, **settings: object) -> None:
        """Make the stream as somebody else would, with settings of the client library's `StreamConfig`."""
        wanted = {"name": "KVLEDGER", "subjects": ["kvledger.log.>"], **settings}
        self.asked(lambda jetstream: jetstream.add_stream(**wanted))

    def delete_messages(self, numbers: Iterable[int]) -> None:
        """Delete messages of the stream by hand."""

        async def delete(jetstream: JetStreamContext) -> None:
            for number in numbers:
                await jetstream.delete_msg("KVLEDGER", number)

        self.asked(delete)

    def restart(self) -> None:
        """Kill it and start it over the same files."""
        self.kill()
        self.start()

    def _runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 5) as connection:
            return connection.recv(5) == b"INFO "
        return False
