"""Decoders for bytes that another program may have written: files of a log directory, payloads, stream messages.

Whatever is wrong with the bytes, these functions raise `Undecodable`, so that a reader can report damage. They also
refuse values that are nested deeper than `MAX_DEPTH`: Python may raise RecursionError when it decodes, prints or
compares such a value. Code that reads such bytes must use these functions. The types of a format are defined by the
module that encodes the format.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeVar, get_args

import msgspec

from kvledger.lifecycle.errors import raise_if_unstoppable

__all__ = [
    "MAX_DEPTH",
    "Undecodable",
    "as_counter",
    "converted",
    "from_json",
    "from_msgpack",
    "is_too_deep",
    "msgpack_decoder",
]

MAX_DEPTH: Final = 64
"""Largest depth of nested containers in a decoded value. kvledger itself writes fewer than ten."""

_T = TypeVar("_T")
Hook = Callable[[type, Any], Any]
"""Converts a decoded value to a type that msgspec does not know. It is passed to msgspec as `dec_hook`."""


class Undecodable(ValueError):
    """Bytes or values that are not what they should be; the message says why."""


def from_msgpack(data: bytes, kind: type[_T] | Any = Any, hook: Hook | None = None) -> _T:  # noqa: ANN401 -- a union is no type
    """Decode msgpack `data` and return a value of the type `kind`. Raises `Undecodable`."""
    try:
        value: _T = msgspec.msgpack.decode(data, type=kind, dec_hook=hook, ext_hook=_no_extension_type)
    except BaseException as error:  # a hook, a constructor or the decoder may raise anything on foreign bytes
        raise_if_unstoppable(error)
        raise _undecodable(error) from error
    # A container takes at least one byte.
    return _shallow(value) if len(data) > MAX_DEPTH else value


def from_json(data: bytes | str, kind: type[_T]) -> _T:
    """Decode JSON `data` and return a value of the type `kind`. Raises `Undecodable`."""
    try:
        value = msgspec.json.decode(data, type=kind)
    except BaseException as error:
        raise_if_unstoppable(error)
        raise _undecodable(error) from error
    return _shallow(value) if len(data) > MAX_DEPTH else value


def converted(value: object, kind: type[_T] | Any, hook: Hook | None = None) -> _T:  # noqa: ANN401 -- a union is no type
    """Convert `value`, which is already decoded, to the type `kind`. Raises `Undecodable`."""
    try:
        result: _T = msgspec.convert(value, kind, dec_hook=hook)
    except BaseException as error:
        raise_if_unstoppable(error)
        raise _undecodable(error) from error
    return result


def msgpack_decoder(kind: Any, hook: Hook | None = None) -> Callable[[bytes], Any]:  # noqa: ANN401 -- a union is no type
    """Return a function that decodes msgpack to values of the type `kind`. The function raises `Undecodable`.

    The function is fast for many or large values, because it does not check their nesting. Parts of a value that the
    caller prints or compares must therefore have a more exact type than `Any`.
    """
    decode = msgspec.msgpack.Decoder(kind, dec_hook=hook, ext_hook=_no_extension_type).decode

    def decode_untrusted(data: bytes) -> Any:  # noqa: ANN401 -- of the kind
        try:
            return decode(data)
        except BaseException as error:
            raise_if_unstoppable(error)
            raise _undecodable(error) from error

    return decode_untrusted


def as_counter(counter_type: type, counts: dict[Any, int]) -> Counter[Any]:
    """Convert a decoded dict to a `Counter`. Pass this function as `hook`, because msgspec decodes no counters."""
    (key_type,) = get_args(counter_type)
    return Counter({key_type(key): int(count) for key, count in counts.items()})


def _no_extension_type(code: int, _data: memoryview) -> object:
    raise Undecodable(f"the data has a value of msgpack's extension type {code}, which kvledger never writes")


def is_too_deep(value: object) -> bool:
    """Whether the containers in `value` are nested more than `MAX_DEPTH` deep."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [inner for outer in level for inner in _parts(outer) if not isinstance(inner, _PLAIN)]
        if not level:
            return False
    return True


_PLAIN: Final = (str, int, float, bytes, type(None))


def _parts(value: object) -> Iterable[object]:
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.astuple(value)
    if isinstance(value, Mapping):
        return (*value, *value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return value
    fields = getattr(type(value), "__attrs_attrs__", ())
    return [getattr(value, field.name) for field in fields]


def _shallow(value: _T) -> _T:
    if is_too_deep(value):
        raise Undecodable(_TOO_DEEP)
    return value


_TOO_DEEP: Final = f"nested more than {MAX_DEPTH} deep"


def _undecodable(error: BaseException) -> Undecodable:
    if isinstance(error, MemoryError):
        raise error
    return Undecodable(_TOO_DEEP if isinstance(error, RecursionError) else f"{type(error).__name__}: {error}")
