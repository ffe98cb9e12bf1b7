"""Who may ship and read what, over which line; and what is said to whoever may not."""

from __future__ import annotations

import contextlib
import random
import re
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from log_torture import reopened
from nats_server import NatsServer, segments_in_stream, segments_of, write_log
from nats_server.certificates import Authority

from kvledger.storage.events.nats import (
    Access,
    StreamAddress,
    StreamRefused,
    StreamUnavailable,
    logs_in_stream,
    mirror,
)

Ship = Any

# The permissions that docs/fleet.md gives.
USERS = """
accounts {
  fleet {
    jetstream: enabled
    users: [
      {user: admin, password: admin}
      {user: shipper, password: secret, permissions: {
        publish: ["kvledger.log.host-a.*", "$JS.API.STREAM.INFO.KVLEDGER", "$JS.API.STREAM.MSG.GET.KVLEDGER"]
        subscribe: "_INBOX.>"
      }}
      {user: reader, password: secret, permissions: {
        publish: ["$JS.API.STREAM.INFO.KVLEDGER", "$JS.API.STREAM.MSG.GET.KVLEDGER", "$JS.API.CONSUMER.*.KVLEDGER.>",
                  "$JS.API.CONSUMER.MSG.NEXT.KVLEDGER.>"]
        subscribe: "_INBOX.>"
      }}
    ]
  }
}
"""


ADMIN = Access(user="admin", password="admin")
SHIPPER = Access(user="shipper", password="secret")
READER = Access(user="reader", password="secret")


@pytest.fixture
def log(tmp_path: Path, chance: random.Random) -> Path:
    """A log to ship."""
    return write_log(tmp_path / "log", chance, 100)


@pytest.fixture
def guarded(new_server: Callable[[str], NatsServer], ship: Ship, tmp_path: Path) -> NatsServer:
    """A server with users of few rights, and the stream, made by the administrator."""
    server = new_server(USERS)
    ship(write_log(tmp_path / "first", random.Random(0), 1), server.url, access=ADMIN)
    return server


def test_a_shipper_needs_only_its_hosts_subjects(guarded: NatsServer, ship: Ship, log: Path) -> None:
    """The permissions of the documentation are enough."""
    report = ship(log, guarded.url, access=SHIPPER, label="host-a", new_stream=None)
    assert report.is_complete
    url = guarded.url.replace("nats://", "nats://admin:admin@")
    assert segments_in_stream(url, report.logs[0].log_id) == segments_of(log)


def test_a_shipper_may_not_write_another_hosts_logs(guarded: NatsServer, ship: Ship, log: Path) -> None:
    """The server denies it, and the message says which subject."""
    report = ship(log, guarded.url, access=SHIPPER, label="host-b", new_stream=None)
    assert report.is_refused
    assert not report.is_complete
    assert re.search(r"(?i)permissions violation.*kvledger\.log\.host-b", report.logs[0].problem)


def test_a_log_that_may_not_be_shipped_does_not_keep_the_others(
    guarded: NatsServer, ship: Ship, tmp_path: Path, chance: random.Random
) -> None:
    """A log that was moved here from another host stays under that host's subject, which this one may not write."""
    moved = write_log(tmp_path / "logs" / "a-moved", chance, 20)
    ship(moved, guarded.url, access=ADMIN, label="host-b")
    store = reopened(moved)
    for _ in range(100):
        store.append(b"more", 1)
    store.close()
    own = write_log(tmp_path / "logs" / "b-own", chance, 600)
    report = ship(tmp_path / "logs", guarded.url, access=SHIPPER, label="host-a", new_stream=None)
    assert [log.problem_kind for log in report.logs] == ["refused", ""]
    url = guarded.url.replace("nats://", "nats://admin:admin@")
    assert segments_in_stream(url, report.logs[1].log_id) == segments_of(own)


def test_a_reader_needs_no_right_to_write(guarded: NatsServer, ship: Ship, log: Path, tmp_path: Path) -> None:
    """The permissions of the documentation are enough to list and to mirror."""
    ship(log, guarded.url, access=SHIPPER, label="host-a", new_stream=None)
    address = StreamAddress.parse(guarded.url)
    (found,) = [one for one in logs_in_stream(address, access=READER) if one.label == "host-a"]
    (copy,) = mirror(StreamAddress.parse(f"{guarded.url}/KVLEDGER/{found.log_id}"), tmp_path / "mirror", access=READER)
    assert segments_of(copy) == segments_of(log)
    other = write_log(tmp_path / "other", random.Random(1), 3)
    report = ship(other, guarded.url, access=READER, label="host-a", new_stream=None)
    assert report.is_refused
    assert "ermissions" in report.logs[0].problem


@pytest.mark.parametrize("password", ["wrong", ""])
def test_wrong_credentials_end_the_shipper_at_once(guarded: NatsServer, ship: Ship, log: Path, password: str) -> None:
    """Trying again would not help, and would lock accounts elsewhere."""
    with pytest.raises(StreamRefused, match="credentials") as refusal:
        ship(log, guarded.url, access=Access(user="shipper", password=password))
    assert "trying again" not in "".join(ship.remarks)
    assert "wrong" not in str(refusal.value)


def test_a_password_in_the_address_is_refused_and_not_shown() -> None:
    """Everybody could read it in the list of processes; the message says where it belongs."""
    with pytest.raises(StreamRefused, match="NATS_PASSWORD") as refusal:
        StreamAddress.parse("nats://shipper:secret@host/S")
    assert "secret" not in str(refusal.value)


def test_a_log_is_shipped_with_an_nkey(
    new_server: Callable[[str], NatsServer], ship: Ship, log: Path, tmp_path: Path
) -> None:
    """A key instead of a password; it never leaves the machine."""
    nkeys = pytest.importorskip("nkeys")
    seed = nkeys.encode_seed(random.Random(1).randbytes(32), nkeys.PREFIX_BYTE_USER)
    public = nkeys.from_seed(bytearray(seed)).public_key.decode()
    server = new_server(f"authorization: {{ users: [ {{ nkey: {public} }} ] }}")
    seed_file = tmp_path / "user.nk"
    seed_file.write_bytes(seed)
    assert ship(log, server.url, access=Access(nkey_file=seed_file)).is_complete


def test_a_log_is_shipped_with_a_credentials_file_and_not_with_another_operators(
    new_server: Callable[[str], NatsServer], ship: Ship, log: Path, tmp_path: Path
) -> None:
    """JWT and seed, as `nsc` writes them."""
    credentials = pytest.importorskip("nats_server.credentials")
    operator, stranger = credentials.Operator(), credentials.Operator()
    server = new_server(operator.configuration)
    access = Access(creds_file=operator.credentials(tmp_path / "user.creds"))
    assert ship(log, server.url, access=access).is_complete
    (copy,) = mirror(StreamAddress.parse(server.url), tmp_path / "mirror", access=access)
    assert segments_of(copy) == segments_of(log)
    with pytest.raises(StreamRefused, match="credentials"):
        ship(log, server.url, access=Access(creds_file=stranger.credentials(tmp_path / "stranger.creds")))


@pytest.mark.parametrize("kind", ["creds_file", "nkey_file"])
def test_a_file_that_holds_no_key_is_named(
    server: NatsServer, ship: Ship, log: Path, tmp_path: Path, kind: str
) -> None:
    """Before the client library reads it, which would wait for ever."""
    (tmp_path / "wrong").write_text("nothing of the kind\n")
    for name in ("nowhere", "wrong"):
        with pytest.raises(StreamRefused, match=name):
            ship(log, server.url, access=Access(**{kind: tmp_path / name}))


class Encrypted:
    """A server that insists on TLS and on a client's certificate, and the files to talk to it."""

    def __init__(self, new_server: Callable[[str], NatsServer], directory: Path) -> None:
        self.authority = Authority(directory, "authority")
        self.stranger = Authority(directory, "stranger")
        certificate, key = self.authority.issue("server")
        self.client = self.authority.issue("client")
        self.server = new_server(
            f'tls {{ cert_file: "{certificate}", key_file: "{key}", '
            f'ca_file: "{self.authority.certificate}", verify: true }}'
        )


@pytest.fixture
def encrypted(new_server: Callable[[str], NatsServer], tmp_path: Path) -> Encrypted:
    """A server with TLS, and certificates."""
    return Encrypted(new_server, tmp_path / "certificates")


def test_a_log_is_shipped_and_read_over_tls(encrypted: Encrypted, ship: Ship, log: Path, tmp_path: Path) -> None:
    """With both sides' certificates."""
    certificate, key = encrypted.client
    access = Access(tls_ca=encrypted.authority.certificate, tls_cert=certificate, tls_key=key)
    assert ship(log, encrypted.server.url, access=access).is_complete
    (copy,) = mirror(StreamAddress.parse(encrypted.server.url), tmp_path / "mirror", access=access)
    assert segments_of(copy) == segments_of(log)


def test_a_certificate_of_a_stranger_is_refused(encrypted: Encrypted, ship: Ship, log: Path) -> None:
    """The server may be anybody."""
    certificate, key = encrypted.client
    access = Access(tls_ca=encrypted.stranger.certificate, tls_cert=certificate, tls_key=key)
    with pytest.raises(StreamRefused, match=r"(?i)certificate"):
        ship(log, encrypted.server.url, access=access)


def test_a_client_without_a_certificate_is_refused(encrypted: Encrypted, ship: Ship, log: Path) -> None:
    """And is told of the certificate, also where the end of the connection overtakes the server's reason."""
    with pytest.raises((StreamRefused, StreamUnavailable), match=r"(?i)TLS|certificate"):
        ship(log, encrypted.server.url, access=Access(tls_ca=encrypted.authority.certificate), give_up_after_s=0)


def test_a_server_that_hangs_up_instead_of_tls_may_want_a_certificate(
    encrypted: Encrypted, ship: Ship, log: Path
) -> None:
    """It is asked again, for a reset overtakes alerts; then what its alert would say is said in its place."""
    greeted: list[object] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=hang_up_after_the_greeting, args=[listener, greeted])
        thread.start()
        url = f"nats://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(StreamUnavailable, match=r"NATS_CERT"):
            ship(log, url, access=Access(tls_ca=encrypted.authority.certificate), give_up_after_s=0)
        listener.shutdown(socket.SHUT_RDWR)  # ends the accept
        thread.join()
    assert len(greeted) > 1


def hang_up_after_the_greeting(listener: socket.socket, greeted: list[object]) -> None:
    """Ask for TLS as a server does, and reset the connection."""
    with contextlib.suppress(OSError):
        while True:
            connection, peer = listener.accept()
            greeted.append(peer)
            connection.sendall(b'INFO {"tls_required": true, "max_payload": 1048576}\r\n')
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()


@pytest.mark.parametrize("scheme", ["nats", "tls"])
def test_nothing_is_sent_in_the_clear_when_tls_was_asked_for(
    server: NatsServer, ship: Ship, log: Path, scheme: str, tmp_path: Path
) -> None:
    """A server that pretends to have no TLS does not get the password."""
    authority = Authority(tmp_path / "certificates", "authority") if scheme == "nats" else None
    access = Access(user="u", password="p", tls_ca=None if authority is None else authority.certificate)
    with pytest.raises(StreamRefused, match="no TLS"):
        ship(log, server.url.replace("nats://", f"{scheme}://"), access=access)


def test_files_that_are_no_certificates_are_named(server: NatsServer, ship: Ship, log: Path, tmp_path: Path) -> None:
    """Before anybody is asked."""
    (tmp_path / "ca.pem").write_text("no certificate")
    with pytest.raises(StreamRefused, match=r"ca\.pem"):
        ship(log, server.url, access=Access(tls_ca=tmp_path / "ca.pem"))


def test_a_server_without_jetstream_is_named_as_that(
    new_server: Callable[[str], NatsServer], ship: Ship, log: Path
) -> None:
    """The connection works, nobody answers."""
    server = new_server("accounts { plain { users: [ {user: u, password: p} ] } }")
    with pytest.raises(StreamRefused, match=r"(?i)jetstream"):
        ship(log, server.url, access=Access(user="u", password="p"), give_up_after_s=0)


ADDRESSES = {
    "nats://host": ("nats://host:4222/KVLEDGER", None),
    "tls://host:99/S": ("tls://host:99/S", None),
    "nats://a,b:5/S/0123AB": ("nats://a:4222,b:5/S/0123ab", "0123ab"),
    "nats://[::1]:7/S": ("nats://[::1]:7/S", None),
}


@pytest.mark.parametrize("url", ADDRESSES)
def test_addresses_that_are_understood(url: str) -> None:
    """Ports and the stream's name have defaults; a log's id may be its beginning."""
    address = StreamAddress.parse(url)
    assert (str(address), address.log_id) == ADDRESSES[url]


@pytest.mark.parametrize(
    "url", ["http://host/S", "nats://", "nats:///S", "nats://h/S/12/x", "nats://h/a.b", "nats://h/S/xyz"]
)
def test_addresses_that_are_refused(url: str) -> None:
    """With the address and the reason."""
    with pytest.raises(StreamRefused, match="not a stream address"):
        StreamAddress.parse(url)


def test_the_environment_names_what_the_nats_command_reads() -> None:
    """The same variables, so that both find their way with the same settings."""
    given = {"NATS_USER": "u", "NATS_PASSWORD": "p", "NATS_CA": "/ca.pem", "NATS_CREDS": ""}
    access = Access.from_environment(given)
    assert (access.user, access.password, access.tls_ca, access.creds_file) == ("u", "p", Path("/ca.pem"), None)
