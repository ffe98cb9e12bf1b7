"""Turns pydantic's errors into kvledger's refusals: key, value, reason, remedy.

This module handles errors about kvledger's settings and about vLLM's own. It must not contain the name of any key.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import attrs

from kvledger.lifecycle import ConfigurationError, Hidden, Refusal

if TYPE_CHECKING:
    import pydantic
    from pydantic_core import ErrorDetails

_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
_CHOICES = ("enum", "literal_error")
_SIZES = ("byte_size", "byte_size_unit")
_MUST_BE = {
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "dict_type": "must be an object, as in {}",
    "path_type": 'must be a path in quotes, such as "/var/log/kvledger"',
    "tuple_type": "must be a list, as in []",
}
"""Pydantic's error type → reason without Python's terms."""
_MISSPELT = 0.8
"""Similarity, from 0 to 1, from which on a name counts as a misspelling of a known name. `chunksize` has 0.95,
`host_pass` has 0.63."""
_NOT_GIVEN: Mapping[str, tuple[str, str]] = MappingProxyType({})


def unknown(key: str, value: object, name: str, known: Iterable[str], what: str = "key") -> Refusal:
    """Return the refusal of an unknown name, which is a key or a value. Suggests the nearest known name, or all names.

    The value of an unknown key is shown only if the key looks misspelt. Otherwise the value may be another program's
    password.
    """
    # "KVLedger" alone is as near to the recorder as to the connector.
    nearest = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6 if what == "key" else 0.7)
    is_misspelt = difflib.get_close_matches(name, list(known), n=1, cutoff=_MISSPELT)
    if what == "key" and not is_misspelt and not isinstance(value, bool):
        value = Hidden.of(value)
    remedy = f"did you mean {nearest[0]}?" if nearest else f"use one of {', '.join(known)}"
    return Refusal(f"unknown {what}", remedy, key, value)


def refusals(
    error: pydantic.ValidationError,
    known: Iterable[str] = (),
    elsewhere: Mapping[str, tuple[str, str]] = _NOT_GIVEN,
    inside: str = "",
) -> tuple[Refusal, ...]:
    """Return one refusal for each wrong key.

    `elsewhere`: key that belongs in another place → reason and remedy. `inside` is the name of the key whose value
    contains all of these keys; empty if there is none.
    """
    every = error.errors(include_url=False)
    problems = [each for each in every if each["type"] != "is_instance_of"] or every  # JSON cannot hold an instance
    found: dict[str, list[Refusal]] = {}
    for problem in problems:
        key = ".".join(map(str, _place(problem, every)))
        for refusal in _in_words(problem, key, list(known), elsewhere):
            found.setdefault(refusal.key, []).append(refusal)
    return tuple(_within(inside, refusal) for several in found.values() for refusal in _joined(several))


def _place(problem: ErrorDetails, every: list[ErrorDetails]) -> tuple[int | str, ...]:
    """Return the path of the key that a problem is about.

    If the key's type is a union, pydantic appends a name of its own to the path. This function leaves that name out.
    The problems of one union have the same value, and their paths differ only in that name.
    """
    place = problem["loc"]
    alike = [each for each in every if each["loc"][:-1] == place[:-1] and each["input"] == problem["input"]]
    is_union = len(place) > 1 and len(alike) > 1 and isinstance(place[-1], str)
    return place[:-1] if is_union else place


def _in_words(
    problem: ErrorDetails, key: str, known: list[str], elsewhere: Mapping[str, tuple[str, str]]
) -> Iterator[Refusal]:
    value, kind = problem["input"] if key else None, problem["type"]
    raised = problem.get("ctx", {}).get("error")
    if isinstance(raised, ConfigurationError):
        for each in raised.refusals:
            yield each if each.key else Refusal(each.reason, each.remedy, key, value)
    elif kind in _UNKNOWN and key in elsewhere:
        yield Refusal(*elsewhere[key], key, value)
    elif kind in _UNKNOWN:
        yield unknown(key, value, key, known)
    elif kind in _SIZES:
        yield Refusal("is not a size", 'write one such as "2GiB", or a number of bytes', key, value)
    elif kind in _CHOICES:
        expected = problem["ctx"]["expected"]
        nearest = difflib.get_close_matches(str(value), re.findall("'(.*?)'", expected), n=1)
        yield Refusal(f"must be {expected}", f"did you mean {nearest[0]!r}?" if nearest else "", key, value)
    else:
        said = problem["msg"].removeprefix("Value error, ").rstrip(".")
        if kind == "dict_type" and isinstance(value, str):
            value = Hidden.of(value)  # a value without its name may be a secret
        reason = _MUST_BE.get(kind, said.replace("Input should", "must").partition(", unable")[0].partition(", got")[0])
        yield Refusal(reason if key else f"vLLM refuses it: {said}", "", key, value)


def _joined(refused: list[Refusal]) -> list[Refusal]:
    """Join the refusals of one key, whose type is a union, into one refusal that names every alternative."""
    first, *others = refused
    if not first.key or not others:
        return refused
    reason = ", or ".join(dict.fromkeys([first.reason, *(each.reason.removeprefix("must be ") for each in others)]))
    return [Refusal(reason, first.remedy, first.key, first.value)]


def _within(key: str, refusal: Refusal) -> Refusal:
    return attrs.evolve(refusal, key=f"{key}.{refusal.key}") if key and refusal.key else refusal
