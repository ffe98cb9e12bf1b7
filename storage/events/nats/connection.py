"""One connection to the servers, without a second chance: when it ends, its user makes another and looks anew.

Turns everything that NATS can answer into `StreamUnavailable` (try again) or `StreamRefused` (do not).
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from typing import TYPE_CHECKING, Any, Final, TypeVar

import attrs
import msgspec
from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError, UnexpectedEOF
from nats.js.errors import APIError, ServerError, ServiceUnavailableError

from kvledger.storage.events.nats.errors import StreamError, StreamRefused, StreamUnavailable
from kvledger.storage.events.nats.messages import SUBJECT_PREFIX
from kvledger.storage.extras import require

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping

    from nats.js import JetStreamContext

    from kvledger.storage.events.nats.address import Access, StreamAddress

__all__ = ["ANSWER_WITHIN_S", "Connection", "connect"]

ANSWER_WITHIN_S: Final = 5.0

_CONNECT_TIMEOUT_S: Final = 4
_CLOSE_TIMEOUT_S: Final = 1
_MAX_GREETINGS: Final = 3
_NOT_ENABLED: Final = (10039, 10076)
_PING_INTERVAL_S: Final = 10
_API: Final = "$JS.API"
_CUT_OFF: Final = (BrokenPipeError, ConnectionResetError, UnexpectedEOF)

Answer = TypeVar("Answer")


@attrs.define(eq=False)
class Connection:
    """A live connection. `ended` is set when it is no more, or when the server denied something; `reason` says why."""

    address: StreamAddress
    client: Client = attrs.field(repr=False)
    answer_within_s: float = ANSWER_WITHIN_S
    ended: asyncio.Event = attrs.field(factory=asyncio.Event)
    reason: StreamError | None = None
    on_publish_denied: Callable[[str], None] | None = None
    """Told that the server denies publishing to a log's subject: that concerns one log, and no other."""

    @property
    def jetstream(self) -> JetStreamContext:
        """JetStream as the client library offers it."""
        return self.client.jetstream(timeout=self.answer_within_s)

    def check(self) -> None:
        """Raise the reason if the connection ended."""
        if self.ended.is_set():
            raise self.reason or StreamUnavailable(f"{self.address}: the connection was closed")

    @property
    def max_payload(self) -> int:
        """The largest message in bytes, headers included, that the server takes."""
        return self.client.max_payload

    async def request(self, operation: str, body: Mapping[str, object] | None = None) -> dict[str, Any]:
        """Call JetStream's API, for example ``STREAM.INFO.KVLEDGER``, and return the answer as JSON values."""
        data = b"" if body is None else msgspec.json.encode(body)

        async def ask() -> dict[str, Any]:
            message = await self.client.request(f"{_API}.{operation}", data, timeout=self.answer_within_s)
            answer = msgspec.json.decode(message.data, type=dict[str, Any])
            if "error" in answer:
                raise APIError.from_error(answer["error"])
            return answer

        return await self.unless_ended(ask())

    async def unless_ended(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """Await `work`, but no longer than there is a connection. Raises `StreamError`, and `APIError` as it came."""
        task = asyncio.ensure_future(work)
        end = asyncio.ensure_future(self.ended.wait())
        try:
            await asyncio.wait({task, end}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise self.reason or StreamUnavailable(f"{self.address}: the connection was closed")
            return task.result()
        except NoRespondersError as error:
            raise self._no_jetstream() from error
        except APIError as error:
            if isinstance(error, ServiceUnavailableError) and error.err_code is None:
                raise self._no_jetstream() from error
            if error.err_code in _NOT_ENABLED:
                raise StreamRefused(f"{self.address}: {error.description}") from error
            if isinstance(error, ServiceUnavailableError | ServerError):
                raise StreamUnavailable(f"{self.address}: {error.description}") from error
            raise
        except TimeoutError as error:
            silence = f"{self.address}: no answer within {self.answer_within_s:g} s"
            raise self.reason or StreamUnavailable(silence) from error
        except (NatsError, OSError) as error:
            raise self.reason or StreamUnavailable(f"{self.address}: {_text(error)}") from error
        finally:
            for one in (task, end):
                one.cancel()
            await asyncio.gather(task, end, return_exceptions=True)

    def _no_jetstream(self) -> StreamUnavailable:
        return StreamUnavailable(
            f"{self.address}: nobody answers for JetStream: the server was started without it (nats-server -js), the "
            "account may not use it, or the cluster has no leader now"
        )


@contextlib.asynccontextmanager
async def connect(
    address: StreamAddress, access: Access, name: str, answer_within_s: float = ANSWER_WITHIN_S
) -> AsyncIterator[Connection]:
    """Connect for the length of a block; `name` is what the server lists the connection as.

    A server that does not answer within `answer_within_s` is taken for gone. One that refuses says why and hangs up;
    the end of the connection may overtake the reason, so one that hangs up in the greeting is asked again.

    Raises:
        StreamRefused: credentials or certificates do not fit, here or there.
        StreamUnavailable: no server can be reached, or the connection ended.

    """
    async with contextlib.AsyncExitStack() as stack:
        for num_left in reversed(range(_MAX_GREETINGS)):
            try:
                connection = await stack.enter_async_context(_connected(address, access, name, answer_within_s))
                break
            except StreamUnavailable as error:
                if not num_left or not isinstance(error.__cause__, _CUT_OFF):
                    raise
        yield connection


@contextlib.asynccontextmanager
async def _connected(
    address: StreamAddress, access: Access, name: str, answer_within_s: float
) -> AsyncIterator[Connection]:
    access = access.with_user_of(address)
    _check_key_files(access)
    tls = _tls_context(address, access)
    client = Client()
    connection = Connection(address, client, answer_within_s)
    seen: list[Exception] = []

    async def on_error(error: Exception) -> None:
        seen.append(error)
        text = str(error).lower()
        if f'permissions violation for publish to "{SUBJECT_PREFIX}.' in text and connection.on_publish_denied:
            connection.on_publish_denied(_text(error))
        elif "permissions violation" in text:
            connection.reason = StreamRefused(f"{address}: {_text(error)}; docs/fleet.md lists what must be allowed")
            connection.ended.set()

    async def on_closed() -> None:
        if connection.reason is None:
            cause = _text(client.last_error) if client.last_error is not None else "the connection was closed"
            connection.reason = StreamUnavailable(f"{address}: {cause}")
        connection.ended.set()

    def password() -> str:
        _insist_on_tls(address, client, needed=tls is not None)
        return access.password or ""

    def token() -> str:
        _insist_on_tls(address, client, needed=tls is not None)
        return access.token or ""

    try:
        await client.connect(
            address.servers,
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
            password=password if access.user is not None else None,
            token=token if access.token is not None else None,
            user_credentials=None if access.creds_file is None else str(access.creds_file),
            nkeys_seed=None if access.nkey_file is None else str(access.nkey_file),
        )
        _insist_on_tls(address, client, needed=tls is not None)
    except StreamError:
        await _close(client)
        raise
    except (NatsError, OSError, TimeoutError, ValueError) as error:
        await _close(client)
        raise _failure(address, access, [*seen, error]) from error
    try:
        yield connection
    finally:
        await _close(client)


async def _close(client: Client) -> None:
    # Whatever goes wrong while leaving changes nothing any more; a server that does not read must not hold us.
    with contextlib.suppress(NatsError, OSError, TimeoutError):
        await asyncio.wait_for(_closing(client), _CLOSE_TIMEOUT_S)


def _closing(client: Client) -> Awaitable[None]:
    return client.close()


def _check_key_files(access: Access) -> None:
    """Look into files with keys first: the client library never returns from one that is something else."""
    for file, markers in (
        (access.creds_file, (b"BEGIN NATS USER JWT", b"BEGIN USER NKEY SEED")),
        (access.nkey_file, (b"SU",)),
    ):
        if file is None:
            continue
        try:
            content = file.read_bytes()
        except OSError as error:
            raise StreamRefused(f"the credentials cannot be read: {error}") from error
        if not all(marker in content for marker in markers):
            raise StreamRefused(f"{file}: holds no {'credentials' if len(markers) > 1 else 'nkey seed of a user'}")
        try:
            require("the file with keys", "nkeys")
        except ModuleNotFoundError as error:
            raise StreamRefused(str(error)) from error


def _tls_context(address: StreamAddress, access: Access) -> ssl.SSLContext | None:
    if access.tls_ca is None and access.tls_cert is None and not address.needs_tls:
        return None
    try:
        context = ssl.create_default_context(cafile=None if access.tls_ca is None else str(access.tls_ca))
        if access.tls_cert is not None:
            context.load_cert_chain(access.tls_cert, access.tls_key)
    except OSError as error:  # ssl.SSLError is one, too
        files = ", ".join(str(file) for file in (access.tls_ca, access.tls_cert, access.tls_key) if file is not None)
        raise StreamRefused(f"the certificates cannot be used: {error} ({files}); give files in PEM form") from error
    return context


def _insist_on_tls(address: StreamAddress, client: Client, *, needed: bool) -> None:
    """Refuse to go on in the clear. The library would: it encrypts when the server asks for it.

    Called before a password or token leaves this process, so a server that pretends to have no TLS does not get it.
    """
    writer = getattr(client._transport, "_io_writer", None)  # noqa: SLF001 - no public way to ask
    if needed and (writer is None or writer.get_extra_info("ssl_object") is None):
        raise StreamRefused(
            f"{address}: the server offers no TLS, and TLS was asked for; nothing secret was sent to it"
        )


def _failure(address: StreamAddress, access: Access, errors: list[Exception]) -> StreamError:
    for error in errors:
        if isinstance(error, ssl.SSLError):
            return StreamRefused(
                f"{address}: TLS failed: {_text(error)}; check --tls-ca, --tls-cert and the host's name"
            )
        if "authori" in str(error).lower() or "authentication" in str(error).lower():
            return StreamRefused(f"{address}: the server refused the credentials ({_text(error)})")
        if isinstance(error, ValueError):
            return StreamRefused(f"{address}: the credentials cannot be used: {_text(error)}")
    reasons = dict.fromkeys(_text(error) for error in errors)
    anonymous = access.tls_cert is None and (access.tls_ca is not None or address.needs_tls)
    if anonymous and any(isinstance(error, _CUT_OFF) for error in errors):
        # The end of the connection may overtake the server's alert, which says the same.
        reasons["the server may ask for a client's certificate (--tls-cert, --tls-key)"] = None
    return StreamUnavailable(f"{address}: cannot connect: {'; '.join(reasons)}")


def _text(error: BaseException) -> str:
    return str(error).removeprefix("nats: ").strip("'") or type(error).__name__
