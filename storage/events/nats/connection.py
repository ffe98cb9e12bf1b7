"""A connection to the servers for the length of a `with` block. If the connection ends, the block ends too.

A NATS error that the block does not handle is raised as `StreamUnavailable` (another attempt can help) or
`StreamRefused` (it cannot). The client library does not reconnect by itself, because it would then send pending
messages again without telling kvledger.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from typing import TYPE_CHECKING, Final

import attrs
from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError, UnexpectedEOF
from nats.js.errors import APIError, ServerError, ServiceUnavailableError

from kvledger.lifecycle import without_credentials
from kvledger.storage.events.nats.errors import StreamError, StreamRefused, StreamUnavailable
from kvledger.storage.events.nats.messages import SUBJECT_PREFIX
from kvledger.storage.extras import require

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from nats.js import JetStreamContext

    from kvledger.storage.events.nats.address import Access, StreamAddress

__all__ = ["ANSWER_WITHIN_S", "Connection", "connect"]

ANSWER_WITHIN_S: Final = 5.0

_CONNECT_TIMEOUT_S: Final = 4
_CLOSE_TIMEOUT_S: Final = 1
_PING_INTERVAL_S: Final = 10
_MAX_GREETINGS: Final = 3
_NOT_ENABLED: Final = (10039, 10076)
_NO_PEERS: Final = 10005
"""Error code: the cluster has fewer servers than the stream has replicas, for example while the cluster starts."""
_CUT_OFF: Final = (BrokenPipeError, ConnectionResetError, UnexpectedEOF)


@attrs.define(eq=False)
class Connection:
    """A connection to the servers, as `connect` yields it."""

    address: StreamAddress
    client: Client = attrs.field(repr=False)
    answer_within_s: float
    on_publish_denied: Callable[[str], None] = lambda _text: None
    """Called with the server's text when the server denies publishing to one log's subject."""
    reason: StreamError | None = attrs.field(default=None, init=False)
    """Why the connection ended; None: the connection is alive."""
    block: asyncio.Timeout | None = attrs.field(default=None, init=False)

    @property
    def jetstream(self) -> JetStreamContext:
        """The client library's JetStream context."""
        return self.client.jetstream(timeout=self.answer_within_s)

    def unavailable(self, text: str) -> StreamUnavailable:
        """Return a `StreamUnavailable` with the address and this text."""
        return StreamUnavailable(f"{self.address}: {text}")

    def refused(self, text: str) -> StreamRefused:
        """Return a `StreamRefused` with the address and this text."""
        return StreamRefused(f"{self.address}: {text}")

    def end(self, reason: StreamError) -> None:
        """End the `with` block of `connect` now. `connect` then raises the first `reason` that was given."""
        self.reason = self.reason or reason
        if self.block is not None:
            with contextlib.suppress(RuntimeError):  # the block has ended
                self.block.reschedule(asyncio.get_running_loop().time())

    def error(self, error: Exception) -> StreamError:
        """Return the exception to raise in place of an `error` of the client library."""
        if self.reason is not None:
            return self.reason
        if isinstance(error, TimeoutError):
            return self.unavailable(f"no answer within {self.answer_within_s:g} s")
        if isinstance(error, APIError) and error.description:
            is_code = isinstance(error, ServiceUnavailableError | ServerError) and error.err_code not in _NOT_ENABLED
            is_passing = is_code or error.err_code == _NO_PEERS
            return self.unavailable(error.description) if is_passing else self.refused(error.description)
        if isinstance(error, NoRespondersError | ServiceUnavailableError):
            return self.unavailable(
                "JetStream does not respond: the server was started without JetStream (nats-server -js), the account "
                "is not allowed to use JetStream, or the cluster has no leader now"
            )
        return self.unavailable(_text(error))


@contextlib.asynccontextmanager
async def connect(
    address: StreamAddress, access: Access, name: str, answer_within_s: float = ANSWER_WITHIN_S
) -> AsyncIterator[Connection]:
    """Connect for the length of a `with` block. The server lists the connection under `name`.

    A server that does not answer within `answer_within_s` seconds counts as unavailable.

    Raises:
        StreamRefused: credentials, certificates or permissions are wrong, or the server refused a request.
        StreamUnavailable: no server can be reached, the connection ended, or there was no answer.
    """
    connection = await _connected(address, access, name, answer_within_s)
    try:
        async with asyncio.timeout(None) as connection.block:
            if connection.reason is not None:
                raise connection.reason
            yield connection
    except (NatsError, TimeoutError, ConnectionError) as error:
        raise connection.error(error) from error
    finally:
        await _close(connection.client)


async def _connected(address: StreamAddress, access: Access, name: str, answer_within_s: float) -> Connection:
    """Connect. Try again if the server closes the connection during the greeting.

    A server that refuses a connection sends the reason and then closes the connection. The close can arrive before the
    reason; another attempt may then receive the reason.
    """
    _check_key_files(access)
    tls = _tls_context(address, access)
    for num_left in reversed(range(_MAX_GREETINGS)):
        client = Client()
        connection = Connection(address, client, answer_within_s)
        errors: list[Exception] = []
        try:
            await _greet(connection, access, tls, name, errors)
        except StreamError:
            await _close(client)
            raise
        except (NatsError, OSError, ValueError) as error:
            await _close(client)
            if not num_left or not isinstance(error, _CUT_OFF):
                raise _failure(address, access, [*errors, error]) from error
        else:
            return connection
    raise AssertionError("the last greeting ends in a connection or an error")


async def _greet(
    connection: Connection, access: Access, tls: ssl.SSLContext | None, name: str, errors: list[Exception]
) -> None:
    client = connection.client

    async def on_error(error: Exception) -> None:
        errors.append(error)
        text = str(error).lower()
        if f'permissions violation for publish to "{SUBJECT_PREFIX}.' in text:
            connection.on_publish_denied(_text(error))
        elif "permissions violation" in text:
            connection.end(connection.refused(f"{_text(error)}; docs/fleet.md lists the permissions that are needed"))

    async def on_closed() -> None:
        cause = "the connection was closed" if client.last_error is None else _text(client.last_error)
        connection.end(connection.unavailable(cause))

    def secret(value: str | None) -> str:
        """Check that TLS is used if it is required, then return `value`. Called right before the secret is sent."""
        _insist_on_tls(connection, needed=tls is not None)
        return value or ""

    await client.connect(
        connection.address.servers,
        name=name,
        allow_reconnect=False,
        max_reconnect_attempts=1,
        reconnect_time_wait=0,
        connect_timeout=_CONNECT_TIMEOUT_S,
        ping_interval=_PING_INTERVAL_S,
        max_outstanding_pings=2,
        error_cb=on_error,
        closed_cb=on_closed,
        tls=tls,
        user=access.user,
        password=None if access.user is None else lambda: secret(access.password),
        token=None if access.token is None else lambda: secret(access.token),
        user_credentials=None if access.creds_file is None else str(access.creds_file),
        nkeys_seed=None if access.nkey_file is None else str(access.nkey_file),
    )
    _insist_on_tls(connection, needed=tls is not None)


async def _close(client: Client) -> None:
    # Errors while leaving do not matter, and a server that does not read must not delay us.
    with contextlib.suppress(NatsError, OSError):
        await asyncio.wait_for(client.close(), _CLOSE_TIMEOUT_S)


def _check_key_files(access: Access) -> None:
    """Check that the key files contain keys. On a credentials file without keys, nats-py 2.16 would hang."""
    for file, markers, what in (
        (access.creds_file, (b"BEGIN NATS USER JWT", b"BEGIN USER NKEY SEED"), "credentials"),
        (access.nkey_file, (b"SU",), "nkey seed of a user"),
    ):
        if file is None:
            continue
        try:
            require("the file with keys", "nkeys")
            content = file.read_bytes()
        except (OSError, ModuleNotFoundError) as error:
            raise StreamRefused(f"{file}: the keys cannot be used: {error}") from error
        if not all(marker in content for marker in markers):
            raise StreamRefused(f"{file}: contains no {what}")


def _tls_context(address: StreamAddress, access: Access) -> ssl.SSLContext | None:
    files = [file for file in (access.tls_ca, access.tls_cert, access.tls_key) if file is not None]
    if not files and not address.needs_tls:
        return None
    try:
        context = ssl.create_default_context(cafile=access.tls_ca)
        if access.tls_cert is not None:
            context.load_cert_chain(access.tls_cert, access.tls_key)
    except OSError as error:  # ssl.SSLError is an OSError
        names = ", ".join(map(str, files))
        raise StreamRefused(f"the certificates cannot be used: {error} ({names}); give files in PEM form") from error
    return context


def _insist_on_tls(connection: Connection, *, needed: bool) -> None:
    """Raise `StreamRefused` if TLS is `needed` and the connection has none.

    The client library uses TLS only if the server asks for it. This function is called before a secret is sent, so a
    server that pretends to have no TLS does not get the secret.
    """
    writer = getattr(connection.client._transport, "_io_writer", None)  # noqa: SLF001 - no public way to ask
    if needed and (writer is None or writer.get_extra_info("ssl_object") is None):
        raise connection.refused("the server offers no TLS, but this connection requires it; no secret was sent")


def _failure(address: StreamAddress, access: Access, errors: list[Exception]) -> StreamError:
    for error in errors:
        if isinstance(error, ssl.SSLError):
            return StreamRefused(f"{address}: TLS failed: {_text(error)}; check NATS_CA, NATS_CERT and the host's name")
        if "authori" in str(error).lower() or "authentication" in str(error).lower():
            return StreamRefused(f"{address}: the server refused the credentials ({_text(error)})")
        if isinstance(error, ValueError):
            return StreamRefused(f"{address}: the credentials cannot be used: {_text(error)}")
    reasons = dict.fromkeys(_text(error) for error in errors)
    is_anonymous = access.tls_cert is None and (access.tls_ca is not None or address.needs_tls)
    if is_anonymous and any(isinstance(error, _CUT_OFF) for error in errors):
        # The hang-up may arrive before the server's TLS alert, which would name this cause.
        reasons["the server may require a client certificate; if so, set NATS_CERT and NATS_KEY"] = None
    return StreamUnavailable(f"{address}: cannot connect: {'; '.join(reasons)}")


def _text(error: BaseException) -> str:
    return without_credentials(str(error)).removeprefix("nats: ").strip("'") or type(error).__name__
