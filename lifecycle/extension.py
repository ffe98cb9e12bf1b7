"""Extensions: additions to a core. `Absent` lets a reader read logs with an extension whose code it lacks.

An extension can have events, sub-states of the phases, handlers that are called after the existing ones, projections,
rules, and settings. It can also choose which chunks are evicted last. A row of a sub-state must lead to the phase to
which the core's row for the same event leads, so an extension cannot make an event legal or illegal. The header of a
log contains the data of its extensions.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from kvledger.lifecycle import events as e
from kvledger.lifecycle.configuration import LedgerConfiguration
from kvledger.lifecycle.declaration import Declaration, ExtensionError, SubRow
from kvledger.lifecycle.handlers import HOOKS, StateHandler, wrong_state
from kvledger.lifecycle.projections import Projections, ProjectionSpec, is_reserved
from kvledger.lifecycle.turn import Turn
from kvledger.lifecycle.untrusted import Undecodable, from_msgpack

if TYPE_CHECKING:
    from kvledger.lifecycle.audit.checker import Checker
    from kvledger.lifecycle.audit.model import AuditModel

_NAME = re.compile(r"[A-Za-z0-9_-]+")
"""Pattern for the names of extensions and of their events. "extension/event" is a trigger in the transition tables.

The core's event ids cannot be confused with these triggers, because they contain a dot.
"""


class Extension:
    """Base class of an addition to a core. An extension must hold no state itself; keep state in a projection."""

    name: ClassVar[str] = ""
    """Required. It must consist of letters, digits, _ and -."""
    version: ClassVar[int] = 1
    """Increase it whenever the code of the previous version could misunderstand a log of the new version."""
    events: ClassVar[Mapping[str, type[msgspec.Struct]]] = {}
    """Name of an event → type of its payload, for observations and decisions."""
    rows: ClassVar[tuple[SubRow, ...]] = ()
    """Transitions into and out of sub-states. A request that moves to another phase leaves its sub-state even without a
    row."""
    handlers: ClassVar[tuple[type[StateHandler], ...]] = ()
    """Handlers that are called after the handlers that their states already have."""
    replaces: ClassVar[tuple[type[StateHandler], ...]] = ()
    """Handlers that are called instead of the core's handlers of their states."""
    leaves_out: ClassVar[Mapping[str, str]] = {}
    """Rule of the core that cannot be checked with the extension → reason; "" if the extension has its own rule of that
    name."""
    projections: ClassVar[tuple[ProjectionSpec, ...]] = ()
    """Projections that fold after those that the core already has."""
    rules: ClassVar[Mapping[str, Callable[[AuditModel], Checker]]] = {}
    """Name of a rule → function that creates the rule's checker."""
    not_checked: ClassVar[Mapping[str, str]] = {}
    """Rule of the extension that cannot be checked from a log → reason."""
    settings: ClassVar[Mapping[str, bool | int | float | str]] = {}
    """Key of a setting → default value."""

    def keeps(self, projections: Projections, key: bytes) -> bool:
        """Whether to evict the chunk with this key after all other chunks. The result must depend only on folded state.

        kvledger asks this only about chunks that it is about to evict.
        """
        return False

    # --- for people; if one of these raises, they see the name and the fields instead

    def words(self, payload: msgspec.Struct) -> str | None:
        """Return the text that `show` and `why` print for an event with this payload.

        "": print nothing, because another event says the same. None: print the event's name and fields.
        """
        return None

    def evidence(self, events: Sequence[tuple[int, e.Event]], configuration: LedgerConfiguration) -> Iterable[str]:
        """Return lines that `why` adds to the last of these events. The lines must follow from the arguments alone.

        Args:
            events: (sequence number, event) of one life, in log order: observations about the request, and answers.
            configuration: the configuration of the log.
        """
        return ()

    def under_way(self, event: e.Event) -> str | None:
        """Return what the extension is doing from this event on, in plain words.

        "": nothing any more. None: the event changes nothing. `show`, `stats` and `verify` print the latest text if the
        log was not closed. `show --follow` prints the text if no more events arrive.
        """
        return None

    def figures(self, payload: msgspec.Struct) -> Mapping[str, int]:
        """Name → amount, which `stats` counts for an event with this payload.

        `stats` adds up the amounts of all events. A name that ends in `_ns` is a duration in nanoseconds: `stats`
        prints its percentiles, and `export` draws it as a call that ends with the event.
        """
        return {}

    # --- its events

    @classmethod
    def setting(cls, configuration: LedgerConfiguration, key: str) -> Any:  # noqa: ANN401 -- of the default's type
        """Return the configured value of `key`, or its default."""
        return configuration.extensions.get(cls.name, {}).get(key, cls.settings[key])

    @classmethod
    def decided(cls, turn: Turn, payload: msgspec.Struct) -> e.ExtensionDecided:
        """Return a decision with this payload, to pass to `turn.decide`."""
        name, encoded = cls._encoded(payload)
        return e.ExtensionDecided(*turn.record.life, cls.name, name, cls.version, encoded, turn.cause)

    @classmethod
    def observed(cls, request_id: str, payload: msgspec.Struct, time_ns: int) -> e.ExtensionObserved:
        """Return an observation about a request, with this payload, to pass to `ledger.observe`."""
        name, encoded = cls._encoded(payload)
        return e.ExtensionObserved(request_id, cls.name, name, cls.version, encoded, time_ns)

    @classmethod
    def noted(cls, payload: msgspec.Struct, time_ns: int) -> e.ExtensionNoted:
        """Return an observation about the engine, with this payload, to pass to `ledger.observe`."""
        name, encoded = cls._encoded(payload)
        return e.ExtensionNoted(cls.name, name, cls.version, encoded, time_ns)

    @classmethod
    def payload_of(cls, event: e.ExtensionEvent) -> msgspec.Struct | None:
        """Return the payload of an event; None if it cannot be read.

        None also if the event belongs to another extension, or to another version of this extension.
        """
        kind = cls.payload_type(event)
        if kind is None:
            return None
        try:
            return from_msgpack(event.payload, kind)
        except Undecodable:
            return None

    @classmethod
    def payload_type(cls, event: e.ExtensionEvent) -> type[msgspec.Struct] | None:
        """Return the payload type of an event.

        None if the event belongs to another extension, or to another version of this extension.
        """
        is_own = event.extension == cls.name and event.extension_version == cls.version
        return cls.events.get(event.name) if is_own else None

    @classmethod
    def _encoded(cls, payload: msgspec.Struct) -> tuple[str, bytes]:
        for name, kind in cls.events.items():
            if type(payload) is kind:
                return name, msgspec.msgpack.encode(payload)
        message = f"extension {cls.name} has no event {type(payload).__qualname__}; add it to the extension's `events`"
        raise ExtensionError(message)

    def declaration(self) -> Declaration:
        """Return what a log's header contains about the extension."""
        return Declaration(
            self.name,
            self.version,
            made_by=f"{type(self).__module__}:{type(self).__qualname__}",
            events=tuple(self.events),
            rows=self.rows,
            hooks=tuple((handler.state.value, hook) for handler in self.handlers for hook in _overridden(handler)),
            replaces=tuple(handler.state.value for handler in self.replaces),
            leaves_out=dict(self.leaves_out),
            projections=tuple(spec.name for spec in self.projections),
            rules=tuple(self.rules),
            keeps=type(self).keeps is not Extension.keeps,
        )


class Absent(Extension):
    """Replaces an extension whose code is not available. It has the extension's sub-states and accepts its events."""

    def __init__(self, declared: Declaration) -> None:
        self._declared = declared
        self.name, self.version, self.rows = declared.name, declared.version, declared.rows  # type: ignore[misc]
        own = f"extension {declared.name} checks this rule in its own way, but its code is not available"
        self.leaves_out = {rule: why or own for rule, why in declared.leaves_out.items()}  # type: ignore[misc]
        self.events = dict.fromkeys(declared.events, msgspec.Struct)  # type: ignore[misc]

    @classmethod
    def payload_type(cls, event: e.ExtensionEvent) -> None:
        """Return None: only the extension's code has the types."""

    def declaration(self) -> Declaration:
        """Return what the log's header contains about the extension."""
        return self._declared


_PARTS = (*Extension.__annotations__, "keeps", "words", "evidence", "under_way", "figures")
"""Attributes that an extension may set."""


def check_parts(extension: Extension) -> None:
    """Refuse an extension with a part that cannot be used, or that would make logs unreadable.

    Raises:
        ExtensionError: a part is refused. The message says which one, why, and what to do.
    """
    for is_right, wrong in _judged_parts(extension):
        if not is_right:
            raise ExtensionError(f"extension {extension.name or type(extension).__qualname__}: its {wrong}")


def _judged_parts(extension: Extension) -> Iterator[tuple[bool, str]]:
    """Yield (whether a part is right, what is wrong otherwise). Later checks rely on the earlier ones."""
    for unknown in (each for each in dir(extension) if not each.startswith("_") and not hasattr(Extension, each)):
        meant = difflib.get_close_matches(unknown, _PARTS, n=1, cutoff=0.85)
        is_meant = bool(meant) and getattr(type(extension), meant[0]) is getattr(Extension, meant[0])
        advice = "".join(f"did you mean {each}? If not, begin its name with an underscore" for each in meant)
        yield not is_meant, f"attribute {unknown} is not a part of an extension, so it would be ignored; {advice}"
    kinds = {
        Mapping: ("events", "rules", "not_checked", "leaves_out"),
        tuple: ("rows", "handlers", "replaces", "projections"),
    }
    for part, kind in ((part, kind) for kind, parts in kinds.items() for part in parts):
        given = getattr(extension, part)
        yield isinstance(given, kind), f"{part} are {given!r}; use a {kind.__name__.lower()}"
    for what, name in (("name", extension.name), *(("event", name) for name in extension.events)):
        is_name = isinstance(name, str) and _NAME.fullmatch(name) is not None
        yield is_name, f"{what} {name!r} is not a valid name; use letters, digits, _ and -"
    yield type(extension.version) is int, f"version is {extension.version!r}; make it a whole number"
    for name, event in extension.events.items():
        yield _derives(event, msgspec.Struct), f"event {name} is {event!r}; name a class derived from msgspec.Struct"
    for row in extension.rows:
        is_row = isinstance(row, tuple) and [type(each) for each in row] == [str] * 3
        yield is_row, f"row {row!r} is not (source, trigger, dest); write a tuple of three strings"
    for handler in (*extension.handlers, *extension.replaces):
        yield (
            _derives(handler, StateHandler),
            f"handler {handler!r} is not a handler; name a class derived from StateHandler",
        )
        yield not wrong_state(handler), f"handler {handler.__qualname__} {wrong_state(handler)}"
    for spec in extension.projections:
        yield isinstance(spec, ProjectionSpec), f"projection {spec!r} is not a projection; use a ProjectionSpec"
        yield not is_reserved(spec.name), f"projection {spec.name!r} would hide an attribute of Projections; rename it"
    for rule, checker in extension.rules.items():
        yield callable(checker), f"rule {rule} is {checker!r}; give the class of its checker"
    unchecked = {rule: why for rule, why in extension.leaves_out.items() if rule not in extension.rules}
    for rule, reason in (*unchecked.items(), *extension.not_checked.items()):
        yield (
            isinstance(reason, str) and reason != "",
            f"rule {rule} is not checked, with the reason {reason!r}; give a reason in words",
        )


def _derives(part: object, base: type) -> bool:
    return isinstance(part, type) and issubclass(part, base)


def _overridden(handler: type[StateHandler]) -> Iterator[str]:
    return (hook for hook in HOOKS if getattr(handler, hook) is not getattr(StateHandler, hook))
