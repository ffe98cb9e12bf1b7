"""Extensions: what somebody else adds to a core, and what a reader without their code can still make of their logs.

An extension has events of its own, sub-states of the phases, handlers that are asked after those that are there,
projections, rules, settings and a say in what is evicted last. A sub-state's row leads where its parent's row leads, so
that what is legal never hangs on an extension. The header of a log has everything of it that is data.
"""

from __future__ import annotations

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
"""Of an extension and its events: triggers have a slash between the two, and the core's own a dot."""


class Extension:
    """What is added to a core; derive from it. It must hold no state: that belongs into a projection."""

    name: ClassVar[str] = ""
    """Letters, digits, _ and -; every extension has one."""
    version: ClassVar[int] = 1
    """Raised whenever a reader of the version before could misunderstand a log."""
    events: ClassVar[Mapping[str, type[msgspec.Struct]]] = {}
    """Name -> what such an event says; both observations and decisions."""
    rows: ClassVar[tuple[SubRow, ...]] = ()
    """Where requests enter and leave sub-states; one that goes on to another phase leaves without a row."""
    handlers: ClassVar[tuple[type[StateHandler], ...]] = ()
    """Asked after those that their states have already."""
    replaces: ClassVar[tuple[type[StateHandler], ...]] = ()
    """Asked in the places of the core's, where somebody else than the core decides."""
    leaves_out: ClassVar[Mapping[str, str]] = {}
    """Rules of the core that cannot be checked where these decide -> why, or "" where a rule here has the name."""
    projections: ClassVar[tuple[ProjectionSpec, ...]] = ()
    """Folded after those that are there."""
    rules: ClassVar[Mapping[str, Callable[[AuditModel], Checker]]] = {}
    """Rule -> how to make its checker."""
    not_checked: ClassVar[Mapping[str, str]] = {}
    """Rule of its own that no log can decide -> why."""
    settings: ClassVar[Mapping[str, bool | int | float | str]] = {}
    """Key -> default."""

    def keeps(self, projections: Projections, key: bytes) -> bool:
        """Whether the chunk with this key is evicted after all others; a function of what was folded.

        It is asked of each chunk that is about to leave, and of no other.
        """
        return False

    # --- for people; where one of these raises, they read the name and the fields instead

    def words(self, payload: msgspec.Struct) -> str | None:
        """What `show` and `why` print of an event: plain words; "" where others tell it; None: its name and fields."""
        return None

    def evidence(self, events: Sequence[tuple[int, e.Event]], configuration: LedgerConfiguration) -> Iterable[str]:
        """What `why` adds to the last of these events: lines that follow from those of the same life before it.

        `events` are (sequence, event) of one request in the log's order: what happened to it, and what was answered.
        """
        return ()

    def under_way(self, event: e.Event) -> str | None:
        """What is under way from this event on, in plain words; "" where it is over; None: the event does not say.

        `show`, `stats` and `verify` say it of a log that ends there, `show --follow` where nothing more comes.
        """
        return None

    def figures(self, payload: msgspec.Struct) -> Mapping[str, int]:
        """What `stats` counts of an event: what it is in plain words -> how much.

        Amounts are added up; of a name that ends in `_ns`, which is a duration in nanoseconds, percentiles are shown.
        `export` draws such a duration as a call that ends with the event.
        """
        return {}

    # --- its events

    @classmethod
    def setting(cls, configuration: LedgerConfiguration, key: str) -> Any:  # noqa: ANN401 -- of the default's type
        """What the configuration says for `key`, or its default."""
        return configuration.extensions.get(cls.name, {}).get(key, cls.settings[key])

    @classmethod
    def decided(cls, turn: Turn, payload: msgspec.Struct) -> e.ExtensionDecided:
        """The decision that says `payload`, for `turn.decide`."""
        name, encoded = cls._encoded(payload)
        return e.ExtensionDecided(*turn.record.life, cls.name, name, cls.version, encoded, turn.cause)

    @classmethod
    def observed(cls, request_id: str, payload: msgspec.Struct, time_ns: int) -> e.ExtensionObserved:
        """The observation that says `payload`, for `ledger.observe`."""
        name, encoded = cls._encoded(payload)
        return e.ExtensionObserved(request_id, cls.name, name, cls.version, encoded, time_ns)

    @classmethod
    def noted(cls, payload: msgspec.Struct, time_ns: int) -> e.ExtensionNoted:
        """The observation that says `payload` of the engine, for `ledger.observe`."""
        name, encoded = cls._encoded(payload)
        return e.ExtensionNoted(cls.name, name, cls.version, encoded, time_ns)

    @classmethod
    def payload_of(cls, event: e.ExtensionEvent) -> msgspec.Struct | None:
        """What an event of this extension says; None where it is of another one, or cannot be read."""
        kind = cls.payload_type(event)
        if kind is None:
            return None
        try:
            return from_msgpack(event.payload, kind)
        except Undecodable:
            return None

    @classmethod
    def payload_type(cls, event: e.ExtensionEvent) -> type[msgspec.Struct] | None:
        """The type of what an event of this extension says; None where it is of another one."""
        is_own = event.extension == cls.name and event.extension_version == cls.version
        return cls.events.get(event.name) if is_own else None

    @classmethod
    def _encoded(cls, payload: msgspec.Struct) -> tuple[str, bytes]:
        for name, kind in cls.events.items():
            if type(payload) is kind:
                return name, msgspec.msgpack.encode(payload)
        message = f"extension {cls.name} has no event {type(payload).__qualname__}; add it to its `events`"
        raise ExtensionError(message)

    def declaration(self) -> Declaration:
        """What a header says about it."""
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
    """Stands for an extension whose code is not here: its sub-states are walked, and its events are accepted."""

    def __init__(self, declared: Declaration) -> None:
        self._declared = declared
        self.name, self.version, self.rows = declared.name, declared.version, declared.rows  # type: ignore[misc]
        own = f"extension {declared.name} checks it in a way of its own, and its code is not here"
        self.leaves_out = {rule: why or own for rule, why in declared.leaves_out.items()}  # type: ignore[misc]
        self.events = dict.fromkeys(declared.events, msgspec.Struct)  # type: ignore[misc]

    @classmethod
    def payload_type(cls, event: e.ExtensionEvent) -> None:
        """Return None: the types are where the code is."""

    def declaration(self) -> Declaration:
        """As the header of the log has it."""
        return self._declared


def check_parts(extension: Extension) -> None:
    """Refuse what could not be used, or makes a log that nobody could read.

    Raises:
        ExtensionError: a part is not what it should be.
    """
    for is_right, wrong in _judged_parts(extension):
        if not is_right:
            raise ExtensionError(f"extension {extension.name or type(extension).__qualname__}: its {wrong}")


def _judged_parts(extension: Extension) -> Iterator[tuple[bool, str]]:
    """(Whether a part is right, what is wrong otherwise); each needs that those before it are."""
    kinds = {
        Mapping: ("events", "rules", "not_checked", "leaves_out"),
        tuple: ("rows", "handlers", "replaces", "projections"),
    }
    for part, kind in ((part, kind) for kind, parts in kinds.items() for part in parts):
        given = getattr(extension, part)
        yield isinstance(given, kind), f"{part} are {given!r}; make them a {kind.__name__.lower()}"
    for what, name in (("name", extension.name), *(("event", name) for name in extension.events)):
        is_name = isinstance(name, str) and _NAME.fullmatch(name) is not None
        yield is_name, f"{what} {name!r} cannot stand in a trigger; take letters, digits, _ and -"
    yield type(extension.version) is int, f"version is {extension.version!r}; make it a whole number"
    for name, event in extension.events.items():
        yield _derives(event, msgspec.Struct), f"event {name} is {event!r}; name a class derived from msgspec.Struct"
    for row in extension.rows:
        is_row = isinstance(row, tuple) and [type(each) for each in row] == [str] * 3
        yield is_row, f"row {row!r} is no (source, trigger, dest); write three strings"
    for handler in (*extension.handlers, *extension.replaces):
        yield _derives(handler, StateHandler), f"handler {handler!r} is none; name a class derived from StateHandler"
        yield not wrong_state(handler), f"handler {handler.__qualname__} {wrong_state(handler)}"
    for spec in extension.projections:
        yield isinstance(spec, ProjectionSpec), f"projection {spec!r} is none; make it a ProjectionSpec"
        yield not is_reserved(spec.name), f"projection {spec.name!r} would hide an attribute of Projections; rename it"
    for rule, checker in extension.rules.items():
        yield callable(checker), f"rule {rule} is {checker!r}; name its checker's class"
    unchecked = {rule: why for rule, why in extension.leaves_out.items() if rule not in extension.rules}
    for rule, reason in (*unchecked.items(), *extension.not_checked.items()):
        yield isinstance(reason, str) and reason != "", f"rule {rule} is not checked for {reason!r}; say why in words"


def _derives(part: object, base: type) -> bool:
    return isinstance(part, type) and issubclass(part, base)


def _overridden(handler: type[StateHandler]) -> Iterator[str]:
    return (hook for hook in HOOKS if getattr(handler, hook) is not getattr(StateHandler, hook))
