"""A real nats-server for tests, a proxy in front of it that breaks, and certificates for it."""

from __future__ import annotations

from nats_server.proxy import Proxy
from nats_server.server import NatsServer, find_nats_server

__all__ = ["NatsServer", "Proxy", "find_nats_server"]
