"""The address of a stream, ``nats://host:4222/STREAM/LOG_ID``, and the credentials for it.

Credentials come from the environment variables of the `nats` command. Passwords and tokens never appear in messages or
in `repr`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs

from kvledger.lifecycle import without_credentials
from kvledger.storage.events.nats.errors import StreamRefused

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["DEFAULT_STREAM", "Access", "StreamAddress"]

DEFAULT_STREAM: Final = "KVLEDGER"

_DEFAULT_PORT: Final = 4222
_HOST: Final = r"(?:\[[0-9A-Fa-f:.]+\]|[^\s,:/@\[\]]+)(?::\d{1,5})?"
_URL: Final = re.compile(
    rf"(?P<scheme>nats|tls)://(?P<hosts>{_HOST}(?:,{_HOST})*)(?:/(?P<stream>[A-Za-z0-9_-]+))?(?:/(?P<log_id>[0-9A-Fa-f]{{1,32}}))?/?"
)
_MUST_BE: Final = (
    "nats://host[:port][,host[:port]…][/STREAM[/LOG_ID]], or the same with tls://. STREAM has letters, digits, '_' and "
    "'-'. LOG_ID is a log's id or its beginning, up to 32 hex digits. Give credentials not here but in NATS_CREDS, "
    "NATS_NKEY, NATS_USER and NATS_PASSWORD, or NATS_TOKEN"
)
_VARIABLES: Final = {
    "creds_file": "NATS_CREDS",
    "nkey_file": "NATS_NKEY",
    "user": "NATS_USER",
    "password": "NATS_PASSWORD",
    "token": "NATS_TOKEN",
    "tls_ca": "NATS_CA",
    "tls_cert": "NATS_CERT",
    "tls_key": "NATS_KEY",
}


@attrs.frozen
class StreamAddress:
    """Address of a stream or of a log in it.

    `hosts` are servers of one cluster (``host:port``). `log_id` is a log's id or its beginning; None: all logs.
    """

    hosts: tuple[str, ...]
    needs_tls: bool = False
    stream: str = DEFAULT_STREAM
    log_id: str | None = None

    @classmethod
    def parse(cls, url: str) -> StreamAddress:
        """Parse a URL. With ``tls://``, the connection must use TLS. Raises `StreamRefused` for a malformed URL."""
        found = _URL.fullmatch(url)
        if found is None:
            shown = without_credentials(url, is_address=True)
            raise StreamRefused(f"{shown}: not a stream address; it must look like {_MUST_BE}")
        hosts = found["hosts"].split(",")
        return cls(
            tuple(host if re.search(r":\d+$", host) else f"{host}:{_DEFAULT_PORT}" for host in hosts),
            found["scheme"] == "tls",
            found["stream"] or DEFAULT_STREAM,
            found["log_id"] and found["log_id"].lower(),
        )

    @property
    def servers(self) -> list[str]:
        """The servers as URLs."""
        return [f"{'tls' if self.needs_tls else 'nats'}://{host}" for host in self.hosts]

    def __str__(self) -> str:
        path = self.stream if self.log_id is None else f"{self.stream}/{self.log_id}"
        return f"{'tls' if self.needs_tls else 'nats'}://{','.join(self.hosts)}/{path}"


@attrs.frozen
class Access:
    """Credentials for the servers, and files for TLS.

    The credentials are a credentials file, an nkey seed file, user and password, or a token.
    """

    creds_file: Path | None = attrs.field(default=None, converter=attrs.converters.optional(Path))
    nkey_file: Path | None = attrs.field(default=None, converter=attrs.converters.optional(Path))
    user: str | None = None
    password: str | None = attrs.field(default=None, repr=False)
    token: str | None = attrs.field(default=None, repr=False)
    tls_ca: Path | None = attrs.field(default=None, converter=attrs.converters.optional(Path))
    tls_cert: Path | None = attrs.field(default=None, converter=attrs.converters.optional(Path))
    tls_key: Path | None = attrs.field(default=None, converter=attrs.converters.optional(Path))

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Access:
        """Read the environment variables of the `nats` command, such as NATS_CREDS, NATS_NKEY and NATS_USER."""
        found: dict[str, Any] = {field: environment.get(name) or None for field, name in _VARIABLES.items()}
        return cls(**found)
