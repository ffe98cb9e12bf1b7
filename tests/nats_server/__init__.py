"""A real nats-server for tests, a proxy in front of it that breaks, and certificates for it."""

from __future__ import annotations

from nats_server.logs import fill, segments_in_stream, segments_of, write_log
from nats_server.proxy import Proxy
from nats_server.server import NatsServer, find_nats_server, start_cluster

__all__ = [
    "NatsServer",
    "Proxy",
    "fill",
    "find_nats_server",
    "segments_in_stream",
    "segments_of",
    "start_cluster",
    "write_log",
]
