"""Where a stream is and who asks for it: ``nats://host:4222/STREAM/LOG_ID``, and the credentials beside it.

Credentials come from options or from the environment variables that the `nats` command reads, too. They are never
shown: not in messages, not in `repr`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import attrs

from kvledger.storage.events.nats.errors import StreamRefused

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["DEFAULT_STREAM", "Access", "StreamAddress", "is_stream_url"]

DEFAULT_STREAM = "KVLEDGER"

_SCHEMES = ("nats", "tls")
_DEFAULT_PORT = 4222
_STREAM_NAME = re.compile(r"[A-Za-z0-9_-]+")
_LOG_ID = re.compile(r"[0-9a-f]{1,32}")


def is_stream_url(text: str) -> bool:
    """Return whether `text` means a stream and no path."""
    return text.partition("://")[0] in _SCHEMES and "://" in text


@attrs.frozen
class StreamAddress:
    """Servers of one cluster, a stream, and a log in it (or the beginning of its id; None: all logs).

    A user without a password is a token. `str()` shows neither.
    """

    hosts: tuple[str, ...]
    needs_tls: bool = False
    stream: str = DEFAULT_STREAM
    log_id: str | None = None
    user: str | None = attrs.field(default=None, repr=False)
    password: str | None = attrs.field(default=None, repr=False)

    @classmethod
    def parse(cls, url: str) -> StreamAddress:
        """Read ``nats://[user[:password]@]host[:port][,host[:port]…][/STREAM[/LOG_ID]]``; ``tls://`` insists on TLS.

        Raises:
            StreamRefused: it is no such address.

        """
        scheme, _, rest = url.partition("://")
        authority, _, path = rest.partition("/")
        names = [name for name in path.split("/") if name]
        if scheme not in _SCHEMES or not authority or len(names) > len(("STREAM", "LOG_ID")):
            raise _not_an_address(url, "it must look like nats://host:4222/STREAM/LOG_ID")
        userinfo, _, hosts = authority.rpartition("@")
        user, has_password, password = userinfo.partition(":")
        stream = names[0] if names else DEFAULT_STREAM
        log_id = names[1].lower() if len(names) > 1 else None
        if not _STREAM_NAME.fullmatch(stream):
            raise _not_an_address(url, f"{stream!r} is no stream name: letters, digits, '_' and '-'")
        if log_id is not None and not _LOG_ID.fullmatch(log_id):
            raise _not_an_address(url, f"{log_id!r} is no log id, nor the beginning of one: up to 32 hex digits")
        return cls(
            tuple(_host(url, host) for host in hosts.split(",")),
            scheme == "tls",
            stream,
            log_id,
            unquote(user) or None,
            unquote(password) if has_password else None,
        )

    @property
    def servers(self) -> list[str]:
        """The servers as URLs, without user and password."""
        return [f"{'tls' if self.needs_tls else 'nats'}://{host}" for host in self.hosts]

    def __str__(self) -> str:
        """The address without user and password."""
        scheme = "tls" if self.needs_tls else "nats"
        path = self.stream if self.log_id is None else f"{self.stream}/{self.log_id}"
        return f"{scheme}://{','.join(self.hosts)}/{path}"


@attrs.frozen
class Access:
    """How to be let in: a credentials file, an nkey seed file, or user and password or a token; and what TLS needs."""

    creds_file: Path | None = None
    nkey_file: Path | None = None
    user: str | None = None
    password: str | None = attrs.field(default=None, repr=False)
    token: str | None = attrs.field(default=None, repr=False)
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None

    def with_user_of(self, address: StreamAddress) -> Access:
        """Return this access with the user and password, or the token, that the address names; they go first."""
        if address.user is None:
            return self
        if address.password is None:
            return attrs.evolve(self, user=None, password=None, token=address.user)
        return attrs.evolve(self, user=address.user, password=address.password, token=None)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Access:
        """Read NATS_CREDS, NATS_NKEY, NATS_USER, NATS_PASSWORD, NATS_TOKEN, NATS_CA, NATS_CERT and NATS_KEY."""
        given = os.environ if environment is None else environment

        def file(name: str) -> Path | None:
            return Path(given[name]) if given.get(name) else None

        return cls(
            creds_file=file("NATS_CREDS"),
            nkey_file=file("NATS_NKEY"),
            user=given.get("NATS_USER") or None,
            password=given.get("NATS_PASSWORD") or None,
            token=given.get("NATS_TOKEN") or None,
            tls_ca=file("NATS_CA"),
            tls_cert=file("NATS_CERT"),
            tls_key=file("NATS_KEY"),
        )


def _host(url: str, host: str) -> str:
    try:
        parts = urlsplit(f"//{host}")
        name, port = parts.hostname, parts.port or _DEFAULT_PORT
    except ValueError as error:
        raise _not_an_address(url, str(error)) from error
    if not name:
        raise _not_an_address(url, "a host is missing")
    return f"[{name}]:{port}" if ":" in name else f"{name}:{port}"


def _not_an_address(url: str, reason: str) -> StreamRefused:
    scheme, _, rest = url.partition("://")
    shown = f"{scheme}://{rest.rpartition('@')[2]}"
    return StreamRefused(f"{shown}: no address of a stream: {reason}")
