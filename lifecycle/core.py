"""The core: everything that gives a log its meaning, as one immutable object made of plain data.

Ledger, replay, audit, codec and snapshots get a core and read nothing else: the events, where they lead, which handlers
decide on them, what they fold to, and the rules for a log. This module checks that the parts fit together. It must not
know the standard parts (`standard.py`).
"""

from __future__ import annotations

import copy
import difflib
import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache, cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import attrs

from kvledger.lifecycle.code import PACKAGE, UNKNOWN, hash_of_core, hash_of_module
from kvledger.lifecycle.configuration import ConfigurationError, LedgerConfiguration, Refusal
from kvledger.lifecycle.declaration import ExtensionError, declared_in
from kvledger.lifecycle.errors import raise_if_unstoppable
from kvledger.lifecycle.events import (
    Event,
    LoadCompleted,
    LoadFailed,
    RequestEvent,
    SaveCompleted,
    SaveFailed,
    triggers_of,
)
from kvledger.lifecycle.extension import Absent, Extension, check_parts
from kvledger.lifecycle.handlers import HOOKS, StateHandler, wrong_state
from kvledger.lifecycle.machine import ReferenceMachine, Tables, compile_tables, table_fingerprint
from kvledger.lifecycle.projections import CORE_PROJECTIONS, Projections, ProjectionSpec
from kvledger.lifecycle.states import RequestState
from kvledger.lifecycle.table import Gating, Region
from kvledger.lifecycle.upcasters import Upcasters, check_upcasters
from kvledger.lifecycle.version import __version__

if TYPE_CHECKING:
    from kvledger.lifecycle.audit.checker import Checker
    from kvledger.lifecycle.audit.model import AuditModel


class CoreError(ValueError):
    """The parts do not make a core. The message names the part, the reason and the remedy."""


_SETTLED: tuple[str, ...] = tuple(
    trigger for event in (LoadCompleted, LoadFailed, SaveCompleted, SaveFailed) for trigger in triggers_of(event)
)
Handlers = Mapping[RequestState, tuple[StateHandler, ...]]


@attrs.frozen(eq=False)
class Core:
    """Everything that gives a log its meaning.

    Raises:
        CoreError: the parts do not fit together.
        TableError: the rows break a rule of `table.py`.
        UpcasterError: an old version of an event could not be read.
    """

    events: Mapping[str, type[Event]]
    """Event id → class."""
    regions: tuple[Region, ...]
    """Flat machines of a request, the phase first. `reference` runs them with the `transitions` library."""
    job_regions: tuple[Region, ...]
    """Flat machines of a transfer job."""
    gating: Gating
    """Consequences of events that they refuse."""
    handlers: Handlers
    """State → its handlers, in the order in which they are called."""
    rules: Mapping[str, Callable[[AuditModel], Checker]]
    """Rule → function that makes its checker, in the order in which checkers see an event."""
    not_checked: Mapping[str, str] = MappingProxyType({})
    """Rule that no log can decide → reason. Readers print it, so that silence does not look like soundness."""
    upcasters: Upcasters = MappingProxyType({})
    """(Event id, version) → how to convert its fields to the next version."""
    extensions: tuple[Extension, ...] = ()
    """Extensions that were added, see `extended`."""
    projections: tuple[ProjectionSpec, ...] = ()
    """Projections of extensions, in the order in which they fold, after those of the core."""
    tables: Tables = attrs.field(init=False)
    """Where the events lead. Folds, checks and decisions get this instead of the core."""

    @tables.default
    def _tables(self) -> Tables:
        declared = [extension.declaration() for extension in self.extensions]
        return compile_tables(self.events, self.regions, self.job_regions, self.gating, declared)

    def __attrs_post_init__(self) -> None:
        for handlers in self.handlers.values():
            for handler in handlers:
                self._check_hooks(handler, check_handler(handler))
        names = [*CORE_PROJECTIONS, *(spec.name for spec in self.projections)]
        if len(set(names)) < len(names):
            message = f"two of the projections {', '.join(names)} have the same name; rename one"
            raise CoreError(message)
        check_upcasters(self.upcasters, self.events)
        both = sorted(self.rules.keys() & self.not_checked.keys())
        if both:
            message = f"rule {both[0]} has both a checker and a reason why it cannot be checked; remove one"
            raise CoreError(message)

    def _check_hooks(self, handler: StateHandler, state: RequestState) -> None:
        """Refuse a handler's method for something that never happens in its state.

        A handler may inherit such methods from a handler of another state, or from a base class of several states,
        unless it has no others.

        Raises:
            CoreError: it would never be called.
        """
        own = tuple(own_hooks(handler))
        never = [hook for hook in own if state not in self.asked_in(hook)]
        wrong = never if len(never) == len(own) else [hook for hook in never if _is_for_its_state(handler, hook)]
        for hook in wrong:
            asked, triggers = self.asked_in(hook), " or ".join(self._triggers_of_hooks[hook])
            message = (
                f"handler {_name_of(handler)} has a method {hook} for state {state}, but the table has no row for "
                f"{triggers} in that state, so it would never be called; remove the method, or move it to a handler of "
                f"{', '.join(each.value for each in asked) or 'a core whose table has such a row'}"
            )
            raise CoreError(message)

    def asked_in(self, hook: str) -> tuple[RequestState, ...]:
        """Return the states whose handlers can be called with this hook, according to the table."""
        legal = self.tables.legal
        states = {state for trigger in self._triggers_of_hooks[hook] for state, _ in legal.get(trigger, ())}
        return tuple(state for state in RequestState if state in states)

    @cached_property
    def _triggers_of_hooks(self) -> Mapping[str, tuple[str, ...]]:
        """Handler method → triggers on which it is called."""
        triggers: dict[str, tuple[str, ...]] = {
            event.handler_method: triggers_of(event) for event in self.observations if issubclass(event, RequestEvent)
        }
        step = dict.fromkeys(("tokens_scheduled", "tokens_settled"), ("tokens.scheduled",))
        return {**triggers, **step, "transfer_settled": _SETTLED}

    @staticmethod
    @cache
    def standard() -> Core:
        """Return the core of kvledger's connector; always the same object."""
        from kvledger.lifecycle.standard import standard_core  # noqa: PLC0415 -- it is made of what imports this file

        return standard_core()

    def replacing(self, *handlers: StateHandler) -> Core:
        """Return a core in which each of these replaces the core's handler of its state. Handlers of extensions stay.

        Raises:
            CoreError: two are for one state, or one is not a handler.
        """
        replaced: dict[RequestState, tuple[StateHandler, ...]] = {}
        for handler in handlers:
            state = check_handler(handler)
            if state in replaced:
                message = (
                    f"{_name_of(replaced[state][0])} and {_name_of(handler)} would both replace the handler of state "
                    f"{state}; name one of them"
                )
                raise CoreError(message)
            replaced[state] = (handler, *filter(self.extension_of_handler, self.handlers[state]))
        return attrs.evolve(self, handlers=MappingProxyType({**self.handlers, **replaced}))

    def adding(self, *handlers: StateHandler) -> Core:
        """Return a core in which each of these is called after the handlers that its state already has.

        Raises:
            CoreError: one is not a handler.
        """
        asked = dict(self.handlers)
        for handler in handlers:
            state = check_handler(handler)
            asked[state] = (*asked[state], handler)
        return attrs.evolve(self, handlers=MappingProxyType(asked))

    def extended(self, *extensions: Extension) -> Core:
        """Return a core with these extensions added. An extension that it already has is not added again.

        Raises:
            CoreError: two different ones have one name, or parts do not fit together or to the core.
        """
        core = self
        for extension in extensions:
            core = core._with(extension)
        return core

    def _with(self, extension: Extension) -> Core:
        _check_instance("extension", extension)
        try:
            check_parts(extension)
        except ExtensionError as error:
            raise CoreError(str(error)) from error
        declared = extension.declaration()
        for other in self.extensions:
            if other.name == extension.name:
                if other.declaration() == declared:
                    return self
                message = (
                    f"extension {declared.name} {declared.version} of {declared.made_by} clashes with version "
                    f"{other.version} of {other.declaration().made_by}; load one of them"
                )
                raise CoreError(message)
        unknown = sorted(extension.leaves_out.keys() - self.rules.keys() - self.not_checked.keys())
        if unknown and not isinstance(extension, Absent):  # a log may be read by a core that has fewer rules
            message = f"extension {extension.name} leaves out {unknown[0]}, which is not a rule here; correct its name"
            raise CoreError(message)
        owners = {("projection", name): "the core" for name in CORE_PROJECTIONS}
        leaves_out = _left_out_by(extension, self.rules)
        rules = {rule: checker for rule, checker in self.rules.items() if rule not in leaves_out}
        owners |= {("rule", rule): "the core" for rule in (*rules, *self.not_checked)}
        owners |= {part: f"extension {other.name}" for other in self.extensions for part in _named_parts(other)}
        for what, name in _named_parts(extension):
            if (what, name) in owners:
                message = (
                    f"extension {extension.name}: {owners[what, name]} has a {what} {name} already; choose another name"
                )
                raise CoreError(message)
        left_out = {rule: why for rule, why in leaves_out.items() if rule not in extension.rules}
        try:
            return attrs.evolve(
                self.replacing(*(each() for each in extension.replaces)).adding(
                    *(each() for each in extension.handlers)
                ),
                projections=(*self.projections, *extension.projections),
                rules=MappingProxyType({**rules, **extension.rules}),
                not_checked=MappingProxyType({**self.not_checked, **left_out, **extension.not_checked}),
                extensions=(*self.extensions, extension),
            )
        except ExtensionError as error:
            raise CoreError(str(error)) from error

    def reading(self, header: Mapping[str, Any], available: Iterable[Extension] = ()) -> Core:
        """Return the core to read a log with: this one, and the extensions that the log was written with.

        If this core lacks an extension and `available` does not have it in the log's version, an `Absent` replaces it.

        Raises:
            CoreError: the header cannot be read, or its extensions do not fit.
        """
        there = {extension.name for extension in self.extensions}
        by_name = {(extension.name, extension.version): extension for extension in available}
        try:
            declared = [each for each in declared_in(header) if each.name not in there]
        except ExtensionError as error:
            raise CoreError(str(error)) from error
        return self.extended(*(by_name.get((each.name, each.version)) or Absent(each) for each in declared))

    def check_settings(self, settings: Mapping[str, Mapping[str, Any]]) -> None:
        """Refuse settings (extension → key → value) that no extension has, or whose type differs from the default's.

        Raises:
            ConfigurationError: which one, why, and what to do.
        """
        known = {extension.name: extension.settings for extension in self.extensions}
        for name, values in settings.items():
            defaults = known.get(name, {})
            unknown = sorted(values.keys() - defaults.keys())
            if name not in known or unknown:
                has = f"has {', '.join(defaults) or 'none'}" if name in known else "is not loaded"
                remedy = f"remove {', '.join(unknown) or name}, or correct its name"
                raise ConfigurationError(Refusal(f"{name} {has}", remedy, "extension_settings", {name: dict(values)}))
            for key, value in values.items():
                kind = type(defaults[key])
                if type(value) is not kind and (kind, type(value)) != (float, int):
                    reason, remedy = f"must be {kind.__name__}", f"write one such as {defaults[key]!r}"
                    raise ConfigurationError(Refusal(reason, remedy, f"extension_settings.{name}.{key}", value))

    @cached_property
    def absent(self) -> tuple[Extension, ...]:
        """Extensions whose code is not available."""
        return tuple(extension for extension in self.extensions if isinstance(extension, Absent))

    @cached_property
    def unjudged(self) -> frozenset[tuple[type[Event], RequestState | None]]:
        """(Class of observations, state or None for all) on which an absent extension may have decided."""
        return frozenset(
            pair for extension in self.absent for pair in extension.declaration().unjudged(self.observations)
        )

    def new_projections(
        self, configuration: LedgerConfiguration, *, only: Collection[str] | None = None
    ) -> Projections:
        """Return the projections of an empty log. With `only`, no others fold."""
        keepers = {
            extension.name: extension.keeps
            for extension in self.extensions
            if extension not in self.absent and extension.declaration().keeps
        }
        return Projections(self.tables, configuration, added=self.projections, keepers=keepers, only=only)

    def handlers_of_run(self) -> Handlers:
        """State → copies of its handlers as they were when the core was made, for one ledger or one replay.

        A handler that keeps a memory, which it must not, cannot affect the next run. One that cannot be copied is used
        as it is.
        """
        try:
            return copy.deepcopy(dict(self.handlers))
        except BaseException as error:  # noqa: BLE001 -- whatever somebody's object raises
            raise_if_unstoppable(error)
            return {state: tuple(map(_copied, handlers)) for state, handlers in self.handlers.items()}

    def extension_of_handler(self, handler: StateHandler) -> str:
        """Return the name of the extension that a handler belongs to; empty if none."""
        brought = (each.name for each in self.extensions if type(handler) in (*each.handlers, *each.replaces))
        return next(brought, "")

    @cached_property
    def observations(self) -> tuple[type[Event], ...]:
        """Events that record what the connector saw."""
        return tuple(event for event in self.events.values() if not event.is_decision)

    @cached_property
    def decisions(self) -> tuple[type[Event], ...]:
        """Events that record what was decided."""
        return tuple(event for event in self.events.values() if event.is_decision)

    @cached_property
    def reference(self) -> ReferenceMachine:
        """The tables, run by `transitions`."""
        return ReferenceMachine((*self.regions, *self.job_regions), self.gating)

    def table_fingerprint(self) -> str:
        """Return the hash of rows and gating that is in every log's header."""
        return table_fingerprint((*self.regions, *self.job_regions), self.gating)

    def handler_fingerprint(self) -> str:
        """Return the handlers' classes by state, as in every log's header."""
        return " ".join(
            f"{state}={'+'.join(map(_name_of, handlers))}" for state, handlers in sorted(self.handlers.items())
        )

    @cached_property
    def code(self) -> Mapping[str, str]:
        """Module or package that decides or folds → hash of its source, as in every log's header.

        The hash of a module outside of kvledger covers its own file and not its imports. See `other_code`.
        """
        handlers = {type(handler) for handlers in self.handlers.values() for handler in handlers}
        extensions = {type(extension) for extension in self.extensions if extension not in self.absent}
        modules = {base.__module__ for part in handlers | extensions for base in part.__mro__}
        modules |= {spec.make.__module__ for spec in self.projections}
        apart = (name for name in sorted(modules) if not name.startswith(PACKAGE) and name != "builtins")
        return MappingProxyType({PACKAGE: hash_of_core(), **{name: hash_of_module(name) for name in apart}})

    def other_code(self, header: Mapping[str, Any]) -> str:
        """Return what decided and folded when the log was written and is different code here; empty if nothing is.

        That is no fault of the log: deciding again with other code shows what a fix changes. `verify` reports handlers
        of other names and absent extensions separately.
        """
        found, ours = header.get("code"), self.code
        theirs = found if isinstance(found, dict) else {}
        are_same_parts = not self.absent and header.get("handler_fingerprint") == self.handler_fingerprint()
        names = ours.keys() | theirs.keys() if are_same_parts else {PACKAGE} | (ours.keys() & theirs.keys())
        others = sorted(name for name in names if theirs.get(name) != ours.get(name) or ours.get(name) == UNKNOWN)
        versions = f"kvledger {header.get('kvledger_version', UNKNOWN)} -> {__version__}"
        return ", ".join(versions if name == PACKAGE else name for name in others)

    def fingerprint(self) -> str:
        """Return a hash of the parts, by name, that determine folds and decisions; see also `code`."""
        events = sorted(
            str((event.id, event.version, event.__struct_fields__, event.variants)) for event in self.events.values()
        )
        projections = [spec.name for spec in self.projections]
        extensions = [str(extension.declaration()) for extension in self.extensions]
        parts = (*events, self.table_fingerprint(), self.handler_fingerprint(), *projections, *extensions)
        return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


def check_handler(handler: StateHandler) -> RequestState:
    """Return the state of a handler.

    Raises:
        CoreError: it is a class, has no state, or has a public method that is never called.
    """
    _check_instance("handler", handler)
    name, wrong = _name_of(handler), wrong_state(handler)
    if wrong:
        message = f"handler {name} {wrong}"
        raise CoreError(message)
    public = (method for method in dir(type(handler)) if not method.startswith("_") and method not in HOOKS)
    for method in public:
        if callable(getattr(handler, method)):
            close = difflib.get_close_matches(method, HOOKS, n=1)
            remedy = f"rename it to {close[0]}" if close else f"rename it to one of {', '.join(HOOKS)}"
            message = (
                f"handler {name} has a method {method}, which is not a hook of StateHandler, so it would never be "
                f"called; {remedy}, or begin its name with an underscore"
            )
            raise CoreError(message)
    return handler.state


def _check_instance(what: str, part: object) -> None:
    if isinstance(part, type):
        message = f"{what} {part.__module__}:{part.__qualname__} is a class; pass an instance: {part.__name__}()"
        raise CoreError(message)


def own_hooks(handler: StateHandler) -> Iterator[str]:
    """Yield the hooks in which a handler differs from its base classes in `handlers`."""
    of_package = [vars(base) for base in type(handler).__mro__ if base.__module__ == StateHandler.__module__]
    for hook in HOOKS:
        method = getattr(handler, hook)
        function = getattr(method, "__func__", method)
        if callable(method) and all(function is not methods.get(hook) for methods in of_package):
            yield hook


def _copied(handler: StateHandler) -> StateHandler:
    try:
        return copy.deepcopy(handler)
    except BaseException as error:  # noqa: BLE001 -- as above
        raise_if_unstoppable(error)
        return handler


def _is_for_its_state(handler: StateHandler, hook: str) -> bool:
    """Whether the hook is defined by the handler itself, or by a class of this handler's state."""
    owner = next((base for base in type(handler).__mro__ if hook in vars(base)), StateHandler)
    return hook in getattr(handler, "__dict__", ()) or getattr(owner, "state", None) is handler.state


def _left_out_by(extension: Extension, rules: Mapping[str, object]) -> Mapping[str, str]:
    """Rule → why it cannot be checked with the extension; also rules about evictions, if the extension decides them."""
    if not extension.declaration().keeps:
        return extension.leaves_out
    why = f"extension {extension.name} decides what is evicted last"
    about_evictions = [rule for rule, checker in rules.items() if getattr(checker, "expects_own_evictions", False)]
    return dict.fromkeys(about_evictions, why) | dict(extension.leaves_out)


def _named_parts(extension: Extension) -> Iterator[tuple[str, str]]:
    yield from (("projection", spec.name) for spec in extension.projections)
    yield from (("rule", rule) for rule in (*extension.rules, *extension.not_checked))


def _name_of(part: object) -> str:
    return f"{type(part).__module__}:{type(part).__qualname__}"
