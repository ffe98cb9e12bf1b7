"""The core: one immutable object that defines what the events of a log mean.

A core has the events, the transition tables, the handlers that decide, the projections that fold, and the rules for a
log. Ledger, replay, audit, codec and snapshots know these parts only through the core that they get. This module checks
that the parts fit together. It must not know the standard parts, which `standard.py` combines.
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
    """Parts that cannot form a core. The message names the part, the reason and the remedy."""


_SETTLED: tuple[str, ...] = tuple(
    trigger for event in (LoadCompleted, LoadFailed, SaveCompleted, SaveFailed) for trigger in triggers_of(event)
)
Handlers = Mapping[RequestState, tuple[StateHandler, ...]]


@attrs.frozen(eq=False)
class Core:
    """The parts that define what the events of a log mean.

    Raises:
        CoreError: the parts do not fit together.
        TableError: rows of the transition tables break a rule that `table.py` states.
        UpcasterError: an upcaster is missing, so an old event could not be read, or an upcaster is superfluous.
    """

    events: Mapping[str, type[Event]]
    """Event id → class."""
    regions: tuple[Region, ...]
    """The state machines of a request, the phase first. `reference` runs them with the `transitions` library."""
    job_regions: tuple[Region, ...]
    """The state machines of a job."""
    gating: Gating
    """What an observation still changes if it is illegal in the request's state."""
    handlers: Handlers
    """State → its handlers, in the order in which they are called."""
    rules: Mapping[str, Callable[[AuditModel], Checker]]
    """Rule → function that creates the rule's checker. Each event goes to every checker, in this order."""
    not_checked: Mapping[str, str] = MappingProxyType({})
    """Rule that cannot be checked from a log → reason.

    Commands print the reason, so that a rule that was not checked does not look like a rule that holds.
    """
    upcasters: Upcasters = MappingProxyType({})
    """(event id, version) → function that converts the event's fields from this version to the next."""
    extensions: tuple[Extension, ...] = ()
    """Extensions that were added, see `extended`."""
    projections: tuple[ProjectionSpec, ...] = ()
    """Projections of extensions, in the order in which they fold. They fold after the core's projections."""
    tables: Tables = attrs.field(init=False)
    """The compiled transition tables. Folds, checks and decisions get these tables instead of the whole core."""

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
        """Refuse a handler method that would never be called, because its event cannot happen in the handler's state.

        A handler may inherit such a method from a handler of another state, or from a base class for several states, if
        at least one other method of the handler can be called.

        Raises:
            CoreError: the handler has a method that would never be called.
        """
        own = tuple(own_hooks(handler))
        never = [hook for hook in own if state not in self.asked_in(hook)]
        wrong = never if len(never) == len(own) else [hook for hook in never if _is_for_its_state(handler, hook)]
        for hook in wrong:
            asked, triggers = self.asked_in(hook), " or ".join(self._triggers_of_hooks[hook])
            message = (
                f"handler {_name_of(handler)} has a method {hook} for state {state}, but the table has no row for "
                f"{triggers} in that state, so the method would never be called; remove it, or move it to a handler of "
                f"{', '.join(each.value for each in asked) or 'a core whose table has such a row'}"
            )
            raise CoreError(message)

    def asked_in(self, hook: str) -> tuple[RequestState, ...]:
        """Return the states in which this handler method can be called, according to the transition tables."""
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
        """Return a core with these handlers. Each replaces the core's handler of the same state.

        Handlers of extensions stay.

        Raises:
            CoreError: two of the handlers are for the same state, or an argument is not a handler.
        """
        replaced: dict[RequestState, tuple[StateHandler, ...]] = {}
        for handler in handlers:
            state = check_handler(handler)
            if state in replaced:
                message = (
                    f"{_name_of(replaced[state][0])} and {_name_of(handler)} would both replace the handler of state "
                    f"{state}; name only one of them"
                )
                raise CoreError(message)
            replaced[state] = (handler, *filter(self.extension_of_handler, self.handlers[state]))
        return attrs.evolve(self, handlers=MappingProxyType({**self.handlers, **replaced}))

    def adding(self, *handlers: StateHandler) -> Core:
        """Return a core with these handlers added. Each is called after the handlers that its state already has.

        Raises:
            CoreError: an argument is not a handler.
        """
        asked = dict(self.handlers)
        for handler in handlers:
            state = check_handler(handler)
            asked[state] = (*asked[state], handler)
        return attrs.evolve(self, handlers=MappingProxyType(asked))

    def extended(self, *extensions: Extension) -> Core:
        """Return a core with these extensions added. An extension that this core already has is not added again.

        Raises:
            CoreError: two different extensions have the same name, or parts of an extension do not fit together or do
                not fit into the core.
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
                    f"extension {declared.name} {declared.version} of {declared.made_by} has the same name as version "
                    f"{other.version} of {other.declaration().made_by}; load only one of the two"
                )
                raise CoreError(message)
        unknown = sorted(extension.leaves_out.keys() - self.rules.keys() - self.not_checked.keys())
        if unknown and not isinstance(extension, Absent):  # a log may be read by a core that has fewer rules
            message = (
                f"extension {extension.name} leaves out {unknown[0]}, which is not a rule of this core; correct the "
                "name of the rule"
            )
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
        """Return the core for reading a log with this header: this core with the log's extensions added.

        kvledger takes the code of an extension from this core, or else from `available`, if the version there is the
        version in the log. Otherwise an `Absent` replaces the extension.

        Raises:
            CoreError: the list of extensions in the header cannot be read, or an extension does not fit into the core.
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
            ConfigurationError: a setting is refused. The message says which one, why, and what to do.
        """
        known = {extension.name: extension.settings for extension in self.extensions}
        for name, values in settings.items():
            defaults = known.get(name, {})
            unknown = sorted(values.keys() - defaults.keys())
            if name not in known or unknown:
                has = "is not loaded"
                if name in known:
                    has = f"has only the settings {', '.join(defaults)}" if defaults else "has no settings"
                remedy = f"remove {', '.join(unknown) or name}, or correct its name"
                raise ConfigurationError(
                    Refusal(f"extension {name} {has}", remedy, "extension_settings", {name: dict(values)})
                )
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
        """(class, state): in this state, an absent extension may have decided on this class of observations.

        None stands for all states.
        """
        return frozenset(
            pair for extension in self.absent for pair in extension.declaration().unjudged(self.observations)
        )

    def new_projections(
        self, configuration: LedgerConfiguration, *, only: Collection[str] | None = None
    ) -> Projections:
        """Return the projections of an empty log. With `only`, just the projections with these names fold."""
        keepers = {
            extension.name: extension.keeps
            for extension in self.extensions
            if extension not in self.absent and extension.declaration().keeps
        }
        return Projections(self.tables, configuration, added=self.projections, keepers=keepers, only=only)

    def handlers_of_run(self) -> Handlers:
        """State → new copies of its handlers, for one ledger or one replay.

        Handlers must not remember anything. If a handler does, its memory stays in this copy, and the next run does not
        get it. A handler that cannot be copied is used as it is.
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
        """Classes of the events that record what the connector saw."""
        return tuple(event for event in self.events.values() if not event.is_decision)

    @cached_property
    def decisions(self) -> tuple[type[Event], ...]:
        """Classes of the events that record what was decided."""
        return tuple(event for event in self.events.values() if event.is_decision)

    @cached_property
    def reference(self) -> ReferenceMachine:
        """The transition tables as state machines of the `transitions` library."""
        return ReferenceMachine((*self.regions, *self.job_regions), self.gating)

    def table_fingerprint(self) -> str:
        """Return the hash of the tables' rows and of the gating. Every log's header contains this hash."""
        return table_fingerprint((*self.regions, *self.job_regions), self.gating)

    def handler_fingerprint(self) -> str:
        """Return the classes of the handlers of each state, as text. Every log's header contains this text."""
        return " ".join(
            f"{state}={'+'.join(map(_name_of, handlers))}" for state, handlers in sorted(self.handlers.items())
        )

    @cached_property
    def code(self) -> Mapping[str, str]:
        """Module or package that decides or folds → hash of its source. Every log's header contains this mapping.

        The hash of a module outside of kvledger's core covers its own file and not the modules that it imports. See
        `other_code`.
        """
        handlers = {type(handler) for handlers in self.handlers.values() for handler in handlers}
        extensions = {type(extension) for extension in self.extensions if extension not in self.absent}
        modules = {base.__module__ for part in handlers | extensions for base in part.__mro__}
        modules |= {spec.make.__module__ for spec in self.projections}
        apart = (name for name in sorted(modules) if not name.startswith(PACKAGE) and name != "builtins")
        return MappingProxyType({PACKAGE: hash_of_core(), **{name: hash_of_module(name) for name in apart}})

    def other_code(self, header: Mapping[str, Any]) -> str:
        """Return, as text, the modules whose code differs between this core and the log with this header.

        For kvledger itself, the text has both versions, or says that the version is the same. The text is empty if no
        code differs. A difference is no fault of the log: a replay with other code shows what a fix changes. `verify`
        reports absent extensions and handlers with other names separately.
        """
        found, ours = header.get("code"), self.code
        theirs = found if isinstance(found, dict) else {}
        are_same_parts = not self.absent and header.get("handler_fingerprint") == self.handler_fingerprint()
        names = ours.keys() | theirs.keys() if are_same_parts else {PACKAGE} | (ours.keys() & theirs.keys())
        others = sorted(name for name in names if theirs.get(name) != ours.get(name) or ours.get(name) == UNKNOWN)
        wrote = header.get("kvledger_version", UNKNOWN)
        versions = (
            f"another build of kvledger {wrote}" if wrote == __version__ else f"kvledger {wrote} -> {__version__}"
        )
        return ", ".join(versions if name == PACKAGE else name for name in others)

    def fingerprint(self) -> str:
        """Return a hash of the parts that determine folds and decisions, without their source; see also `code`."""
        events = sorted(
            str((event.id, event.version, event.__struct_fields__, event.variants)) for event in self.events.values()
        )
        projections = [spec.name for spec in self.projections]
        extensions = [str(extension.declaration()) for extension in self.extensions]
        parts = (*events, self.table_fingerprint(), self.handler_fingerprint(), *projections, *extensions)
        return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


def check_handler(handler: StateHandler) -> RequestState:
    """Check a handler and return its state.

    Raises:
        CoreError: the handler is a class, has no valid state, or has a public method that is not a hook.
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
                f"handler {name} has a method {method}, which is not a hook of StateHandler, so kvledger would never "
                f"call it; {remedy}, or begin its name with an underscore"
            )
            raise CoreError(message)
    return handler.state


def _check_instance(what: str, part: object) -> None:
    if isinstance(part, type):
        message = f"{what} {part.__module__}:{part.__qualname__} is a class; pass an instance: {part.__name__}()"
        raise CoreError(message)


def own_hooks(handler: StateHandler) -> Iterator[str]:
    """Yield the names of the methods of `StateHandler` that code outside of `handlers.py` has overridden."""
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
    """Whether this method is defined on the handler object itself, or in a class that has the handler's state."""
    owner = next((base for base in type(handler).__mro__ if hook in vars(base)), StateHandler)
    return hook in getattr(handler, "__dict__", ()) or getattr(owner, "state", None) is handler.state


def _left_out_by(extension: Extension, rules: Mapping[str, object]) -> Mapping[str, str]:
    """Rule → why the rule cannot be checked if a core has this extension.

    If the extension can choose what is evicted last, this includes rules about evictions.
    """
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
