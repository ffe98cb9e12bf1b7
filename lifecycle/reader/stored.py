"""State that one process stores and another one restores, with checks that layout and code are the same."""

from __future__ import annotations

from functools import cache
from hashlib import blake2b
from typing import Self, TypeVar

import msgspec

from kvledger.lifecycle.code import hash_of_package
from kvledger.lifecycle.untrusted import as_counter, from_msgpack

_State = TypeVar("_State", bound=msgspec.Struct)
_encode = msgspec.msgpack.Encoder().encode


class NotResumable(ValueError):
    """This code cannot continue from the stored bytes. The message has the reason."""


@cache
def layout_of(state: type[msgspec.Struct]) -> str:
    """Return a description of a state's fields and types, which stored bytes must fit."""
    return repr(msgspec.inspect.type_info(state))


def digest(*parts: object) -> str:
    """Return a hash of plain values."""
    return blake2b(_encode(parts), digest_size=16).hexdigest()


class StoredState(msgspec.Struct, forbid_unknown_fields=True):
    """State of one visitor, or of a part that only some models have, after an event."""

    layout: str
    code: str
    state: msgspec.Raw

    @classmethod
    def of(cls, owner: object, state: msgspec.Struct) -> Self:
        """Store the owner's state."""
        return cls(*_fingerprints(owner, type(state)), msgspec.Raw(_encode(state)))

    def state_for(self, owner: object, kind: type[_State], *, trusts_other_code: bool) -> _State:
        """Return the stored state for `owner`. An owner of the same class must have stored it.

        Raises:
            NotResumable: the owner's state has another layout, or other code stored the state and is not trusted.
            Undecodable: the bytes are damaged.
        """
        layout, code = _fingerprints(owner, kind)
        if layout != self.layout or (code != self.code and not trusts_other_code):
            raise NotResumable(f"other code stored the state of {type(owner).__qualname__}")
        return from_msgpack(bytes(self.state), kind, as_counter)


def _fingerprints(owner: object, state: type[msgspec.Struct]) -> tuple[str, str]:
    return digest(type(owner).__qualname__, layout_of(state)), hash_of_package(type(owner).__module__)
