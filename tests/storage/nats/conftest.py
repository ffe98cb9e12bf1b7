"""A real server for each test, logs for it, and a shipper to run in the test's own process."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from nats_server import NatsServer, Proxy, start_cluster

from kvledger.storage.events.nats import Access, Shipper, ShippingReport, StreamAddress, new_stream


@pytest.fixture
def chance() -> random.Random:
    """Return a source of randomness; a failing test shows the KVLEDGER_TEST_SEED that repeats it."""
    seed = int(os.environ.get("KVLEDGER_TEST_SEED", random.randrange(1 << 32)))
    print(f"KVLEDGER_TEST_SEED={seed}")
    return random.Random(seed)


@pytest.fixture
def new_server(nats_server_path: str, tmp_path: Path) -> Iterator[Callable[[str], NatsServer]]:
    """Return what starts a server with a configuration; it is killed at the end."""
    del nats_server_path
    servers: list[NatsServer] = []

    def start(configuration: str = "") -> NatsServer:
        servers.append(NatsServer(tmp_path / f"server-{len(servers)}", configuration))
        return servers[-1].start()

    yield start
    for server in servers:
        server.kill()


@pytest.fixture
def server(new_server: Callable[[str], NatsServer]) -> NatsServer:
    """A server as it comes, with JetStream."""
    return new_server("")


@pytest.fixture
def cluster(nats_server_path: str, tmp_path: Path) -> Iterator[list[NatsServer]]:
    """Three servers that replicate streams among them."""
    del nats_server_path
    servers = start_cluster(tmp_path / "cluster")
    yield servers
    for server in servers:
        server.kill()


@pytest.fixture
def proxy(server: NatsServer) -> Iterator[Proxy]:
    """A network in front of the server, to be cut."""
    proxy = Proxy(server.port)
    yield proxy
    proxy.close()


class Ship:
    """Makes shippers, and runs them. `remarks` has what they said."""

    def __init__(self) -> None:
        self.remarks: list[str] = []

    def make(
        self, path: Path, url: str, *, access: Access | None = None, label: str = "host", **settings: object
    ) -> Shipper:
        """A shipper that makes the stream if it is missing."""
        settings.setdefault("new_stream", new_stream())
        return Shipper(
            path,
            StreamAddress.parse(url),
            access or Access(),
            label,
            on_remark=lambda _log, text: self.remarks.append(text),
            **settings,  # type: ignore[arg-type]
        )

    def __call__(self, path: Path, url: str, **settings: object) -> ShippingReport:
        """Ship all there is."""
        return asyncio.run(self.make(path, url, **settings).run())  # type: ignore[arg-type]


@pytest.fixture
def ship() -> Ship:
    """Ship a log or a directory of logs, in this process."""
    return Ship()
