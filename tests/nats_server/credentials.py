"""A server's operator and its accounts, and a user's credentials file, as NATS signs them: JWTs with ed25519 keys."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

import nkeys

_UNLIMITED = dict.fromkeys(("subs", "data", "payload", "imports", "exports", "conn", "leaf"), -1) | {"wildcards": True}
_JETSTREAM = dict.fromkeys(("mem_storage", "disk_storage", "streams", "consumer"), -1)


class Operator:
    """Signs an account with JetStream; `configuration` makes a server trust it."""

    def __init__(self) -> None:
        operator, self._account, system = (
            _key(kind) for kind in (nkeys.PREFIX_BYTE_OPERATOR, nkeys.PREFIX_BYTE_ACCOUNT, nkeys.PREFIX_BYTE_ACCOUNT)
        )
        signed = {
            _name(account): _token(operator, account, {"type": "account", "limits": limits})
            for account, limits in ((self._account, _UNLIMITED | _JETSTREAM), (system, _UNLIMITED))
        }
        preloaded = "\n".join(f"  {name}: {token}" for name, token in signed.items())
        self.configuration = (
            f"operator: {_token(operator, operator, {'type': 'operator'})}\n"
            f"system_account: {_name(system)}\nresolver: MEMORY\nresolver_preload {{\n{preloaded}\n}}"
        )

    def credentials(self, file: Path) -> Path:
        """A new user's credentials file."""
        seed = _seed(nkeys.PREFIX_BYTE_USER)
        user = nkeys.from_seed(bytearray(seed))
        token = _token(self._account, user, {"type": "user", "subs": -1, "data": -1, "payload": -1})
        file.write_text(
            f"-----BEGIN NATS USER JWT-----\n{token}\n------END NATS USER JWT------\n\n"
            f"-----BEGIN USER NKEY SEED-----\n{seed.decode()}\n------END USER NKEY SEED------\n"
        )
        return file


def _seed(kind: int) -> bytes:
    return bytes(nkeys.encode_seed(os.urandom(32), kind))


def _key(kind: int) -> Any:
    return nkeys.from_seed(bytearray(_seed(kind)))


def _name(key: Any) -> str:
    name: str = key.public_key.decode()
    return name


def _token(issuer: Any, subject: Any, claims: dict[str, object]) -> str:
    header = {"typ": "JWT", "alg": "ed25519-nkey"}
    body = {"jti": os.urandom(8).hex(), "iat": 1_700_000_000, "iss": _name(issuer), "sub": _name(subject)}
    body |= {"name": "test", "nats": {**claims, "version": 2}}
    signed = f"{_encode(json.dumps(header).encode())}.{_encode(json.dumps(body).encode())}"
    return f"{signed}.{_encode(issuer.sign(signed.encode()))}"


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
