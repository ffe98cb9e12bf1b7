"""Addresses and configured values as messages have them: no password, whatever characters it has."""

from __future__ import annotations

import json
import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvledger.lifecycle import ConfigurationError, Hidden, Refusal, without_credentials

SECRETS = ("hunter2", "p/hunter2", "hunter2@x", "a:hunter2:b", "hunter2?x", "hunter2#x", "x@hunter2/y", "%2Fhunter2&")
FORMS = (
    "nats://user:{}@host:4222/STREAM/ab12",
    "tls://{}@host/STREAM",
    "nats://host:4222,user:{}@other/STREAM",
    "redis://:{}@[::1]:6379/0",
    "http:/user:{}@host",
    "https://host/x?sig=1&access_token={}",
    "https://user:pw@host/x#{}",
    "NATS://user:{}@host",
)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("secret", SECRETS)
def test_an_address_is_shown_without_its_credentials(form: str, secret: str) -> None:
    """Alone, in a message, and in quotes; the scheme stays."""
    address = form.format(secret)
    for text, is_address in (
        (address, True),
        (f"{address}: cannot connect; try again", False),
        (f"tried '{address}', then gave up", False),
    ):
        shown = without_credentials(text, is_address=is_address)
        assert "hunter2" not in shown
        assert "user" not in shown
        assert form.partition(":")[0] in shown


@pytest.mark.parametrize("secret", [*SECRETS, "hunter 2", "p w/hunter2 x", "a\nhunter2"])
@pytest.mark.parametrize(
    "form", ["user:{}@host/S", "{}@host", "nats:user:{}@host", "nats://user:{}@host", "user:{}:/w@h"]
)
def test_an_address_alone_may_have_spaces_and_no_scheme(form: str, secret: str) -> None:
    """As KVLEDGER_LOG may be set."""
    shown = without_credentials(form.format(secret), is_address=True)
    assert "hunter" not in shown


@pytest.mark.parametrize(
    "text",
    [
        "nats://host:4222/STREAM/ab12",
        "/var/log/kvledger",
        "a message: with colons, a@b and 3/4",
        "tls://[::1]:4222",
        "",
    ],
)
def test_what_has_no_credentials_is_shown_as_it_is(text: str) -> None:
    """Hosts, ports, streams and paths."""
    assert without_credentials(text) == text
    if "@" not in text:
        assert without_credentials(text, is_address=True) == text


@given(
    st.text().map(lambda text: f"{text}S3CRET").flatmap(lambda secret: st.tuples(st.just(secret), st.text(max_size=9)))
)
def test_no_password_is_left_in_an_address(parts: tuple[str, str]) -> None:
    """Any characters before and after."""
    before, after = parts
    assert "S3CRET" not in without_credentials(f"nats://u:{before}{after}@host/S", is_address=True)
    inside = re.sub(r"\s", "", f"{before}{after}")
    assert "S3CRET" not in without_credentials(f"x: nats://u:{inside}@host/S: y")


def test_a_long_text_is_looked_through_once() -> None:
    """A client's id may have a million characters."""
    for character in ("a", ":", "/", ":/", "@", "://", "'", ":/@"):
        without_credentials(character * 1_000_000)


def test_a_refusal_shows_no_credentials_and_no_mappings() -> None:
    """Incident: an object in the wrong place was printed with the passwords in it."""
    refusals = (
        Refusal("is no list; see https://u:hunter2@host", "write one", "connectors", {"password": "hunter2"}),
        Refusal("is no mapping", "write one", "connector", ["x", {"password": "hunter2"}]),
        Refusal("is no path", "write one", "log_dir", "nats://u:p w/hunter2@host"),
        Refusal("is no list", "write one", "handlers", ("https://host?token=hunter2", 3)),
        Refusal("unknown key", "", "pwd", Hidden.of("hunter2")),
    )
    text = str(ConfigurationError(*refusals))
    assert "hunter2" not in text
    assert "connectors: (mapping of 1): is no list" in text
    assert "connector: (list of 2): is no mapping" in text
    assert "log_dir: 'nats://host': is no path" in text
    assert "pwd: (text of 7 characters): unknown key" in text
    for refusal in refusals:
        assert "hunter2" not in json.dumps([refusal.reason, refusal.value])
        assert "hunter2" not in repr(refusal)
        msgspec.json.encode(refusal.value, enc_hook=str)


def test_plain_values_are_shown_as_they_are() -> None:
    """Most refusals are about one."""
    assert str(Refusal("is no size", "", "host_bytes", "2 potatoes")) == "host_bytes: '2 potatoes': is no size"
    assert str(Refusal("is too small", "", "chunk_sizes", [1, 2.5, None, True])).startswith(
        "chunk_sizes: [1, 2.5, None"
    )
