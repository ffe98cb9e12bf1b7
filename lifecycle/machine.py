"""The transition tables in two forms: plain dicts, and machines of the `transitions` library as a reference.

Both forms are made from the same rows. An engine uses the dicts, because they are faster (measured: 0.06 us per
transition, against 6.7 us with transitions 0.9.3). Every audit also runs the reference machines. It therefore tests
the two forms against each other on the audited log.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, product
from typing import Any

import attrs
from transitions import Machine, MachineError

from kvledger.lifecycle.declaration import Declaration, ExtensionError
from kvledger.lifecycle.events import Event, RequestEvent, triggers_of
from kvledger.lifecycle.states import (
    INITIAL_STATE,
    BlocksRegion,
    RequestState,
    SourceRegion,
    WorkRegion,
)
from kvledger.lifecycle.table import NO_EVENTS, Gating, Region, State

Moves = Mapping[str, Mapping[State, State]]
"""Trigger → source → dest, of one region."""
Standing = tuple[RequestState, BlocksRegion]
"""(phase, blocks): a request's states in the two regions that may refuse an event."""
SubMoves = Mapping[tuple[str, RequestState, str], str]
"""(trigger, phase, sub-state) → next sub-state. "" stands for no sub-state."""


class TableError(ValueError):
    """A transition table that breaks the rules of `table.py`."""


def compile_region(region: Region, events: Iterable[type[Event]]) -> Moves:
    """Turn the rows of a region into `{trigger: {source: dest}}`.

    Raises:
        TableError: a pair of source and trigger occurs twice, a name is not a state or a trigger, a row leaves the
            terminal state, a state cannot be reached, or a row is missing in a region that may not refuse events.
    """
    known = {*NO_EVENTS, *chain.from_iterable(map(triggers_of, events))}
    moves: dict[str, dict[State, State]] = {}
    for source, trigger, dest in region.flat():
        row = f"{region.name}: ({source}, {trigger})"
        if not isinstance(source, region.states) or not isinstance(dest, region.states):
            message = (
                f"{row} leads to {dest}: source and destination must be states of {region.name}; do not write '*', "
                "which would allow every state"
            )
            raise TableError(message)
        if trigger not in known:
            message = f"{row}: there is no such trigger; write an event's id, or id/variant if the event has variants"
            raise TableError(message)
        if source is region.terminal and dest is not source:
            message = f"{row} leads out of {source}, which is a terminal state"
            raise TableError(message)
        if source in moves.setdefault(trigger, {}):
            message = f"{row} appears twice, so the second row would have no effect; remove one"
            raise TableError(message)
        moves[trigger][source] = dest
    unreachable = set(region.states) - _reached(region)
    if unreachable:
        message = f"{region.name}: no events lead to {', '.join(sorted(unreachable))}; add rows or remove the state"
        raise TableError(message)
    for trigger, dests in moves.items():
        missing = set(region.states) - set(dests)
        if missing and not region.may_refuse:
            message = (
                f"{region.name} may not refuse events, but has no row for ({', '.join(sorted(missing))}, {trigger}); "
                "add a row"
            )
            raise TableError(message)
    return moves


def _reached(region: Region) -> set[State]:
    reached: set[State] = {region.initial}
    while more := {dest for source, _, dest in region.flat() if source in reached} - reached:
        reached |= more
    return reached


@attrs.frozen
class Tables:
    """The parts of a core that folding and checking need: the events, and the states to which each one leads."""

    events: Mapping[str, type[Event]]
    """Event id → class."""
    gating: Gating
    """What an observation still changes if phase or `blocks` has no row for it."""
    extensions: tuple[Declaration, ...]
    """Names and parts of the extensions."""
    phase: Moves
    """Moves of the phase alone."""
    legal: Mapping[str, Mapping[Standing, Standing]]
    """Trigger → (phase, blocks) in which the trigger is legal → (phase, blocks) afterwards.

    A trigger that is not in this mapping is always legal.
    """
    after: Mapping[str, Mapping[Standing, Standing]]
    """Trigger → (phase, blocks) → (phase, blocks) afterwards, also where the trigger is illegal.

    A refused event moves only the region that accepts it, unless `gating` names the states after this event.
    """
    others: Mapping[str, tuple[tuple[str, Mapping[State, State]], ...]]
    """Trigger → (region, moves) for each region that the trigger moves besides phase and blocks."""
    work: Mapping[str, Mapping[WorkRegion, WorkRegion]]
    source: Mapping[str, Mapping[SourceRegion, SourceRegion]]
    sub_states: SubMoves
    """Transitions into and out of the sub-states of extensions."""

    @property
    def request_events(self) -> tuple[type[RequestEvent], ...]:
        """Events about one request."""
        return tuple(event for event in self.events.values() if issubclass(event, RequestEvent))

    def may_refuse(self, event_class: type[Event]) -> bool:
        """Whether a request's states may refuse events of this class. Events of other classes are folded in full."""
        named = (trigger for trigger in triggers_of(event_class) if trigger in self.legal)
        may_be_illegal = any(len(self.legal[each]) < len(self.after[each]) for each in named)
        is_about_a_request = issubclass(event_class, RequestEvent) and not event_class.is_decision
        return may_be_illegal and is_about_a_request and event_class.id not in self.gating.never


def compile_tables(
    events: Mapping[str, type[Event]],
    regions: Collection[Region],
    job_regions: Collection[Region],
    gating: Gating,
    extensions: Iterable[Declaration] = (),
) -> Tables:
    """Compile the tables. A trigger is legal in the states for which every region that names the trigger has a row.

    Raises:
        TableError: see `compile_region`; or a region other than `phase` and `blocks` may refuse events.
        ExtensionError: see `compile_sub_rows`.
    """
    compiled = {region.name: compile_region(region, events.values()) for region in regions}
    wrong = [region.name for region in regions if region.may_refuse and region.name not in {"phase", "blocks"}]
    if wrong:
        message = f"{', '.join(wrong)} may refuse events, but only phase and blocks are checked before a fold"
        raise TableError(message)
    phase, blocks = compiled.pop("phase"), compiled.pop("blocks")
    joined = {trigger: list(_joined(phase, blocks, trigger, gating)) for trigger in {**phase, **blocks}}
    jobs: dict[str, Any] = {region.name: compile_region(region, events.values()) for region in job_regions}
    of_events = {trigger: dests for trigger, dests in phase.items() if trigger.partition("/")[0] in events}
    extensions = tuple(extensions)
    return Tables(
        events=events,
        gating=gating,
        extensions=extensions,
        phase=phase,
        legal={
            trigger: {before: dests for before, dests, is_legal in each if is_legal} for trigger, each in joined.items()
        },
        after={trigger: {before: dests for before, dests, _ in each} for trigger, each in joined.items()},
        others={
            trigger: tuple((name, moves[trigger]) for name, moves in compiled.items() if trigger in moves)
            for trigger in dict.fromkeys(trigger for moves in compiled.values() for trigger in moves)
        },
        work=jobs["work"],
        source=jobs["source"],
        sub_states=compile_sub_rows(extensions, of_events),
    )


def _joined(phase: Moves, blocks: Moves, trigger: str, gating: Gating) -> Iterator[tuple[Standing, Standing, bool]]:
    """Yield (states before, states after, whether the trigger is legal) for each pair of phase and blocks state."""
    for state, held in product(RequestState, BlocksRegion):
        dest = phase[trigger].get(state) if trigger in phase else state
        dest_held = blocks[trigger].get(held) if trigger in blocks else held
        is_legal = dest is not None and dest_held is not None
        dests = dest or state, dest_held or held
        if not is_legal:
            dests = gating.resync.get((state, trigger), dests)
        yield (state, held), (RequestState(dests[0]), BlocksRegion(dests[1])), is_legal


def compile_sub_rows(extensions: Iterable[Declaration], phase: Moves) -> SubMoves:
    """Join the rows of all extensions, which move requests between sub-states.

    Raises:
        ExtensionError: a row does not lead to the phase to which the core's row leads, two rows with the same source
            and trigger lead to different sub-states, a sub-state is never entered, or two extensions have sub-states of
            the same phase.
    """
    moves: dict[tuple[str, RequestState, str], str] = {}
    owners: dict[RequestState, str] = {}
    for extension in extensions:
        entered = {dest for _, _, dest in extension.rows}
        for source, trigger, dest in extension.rows:
            row = f"extension {extension.name}: ({source}, {trigger}, {dest})"
            (state, sub), (parent, sub_dest) = _path(source, row), _path(dest, row)
            leads: State | None
            if trigger.partition("/")[0] == extension.name:
                leads = state if trigger.partition("/")[2] in extension.events else None
            else:
                leads = phase.get(trigger, {}).get(state)
            if leads is not parent:
                found = "nowhere, because it is illegal or unknown there" if leads is None else f"to {leads}"
                message = f"{row}: {trigger} leads from {state} {found}; a sub-state's row must lead to the same phase"
                raise ExtensionError(message)
            if sub and source not in entered:
                message = f"{row}: no row enters {source}; add such a row, or remove this one"
                raise ExtensionError(message)
            for path_state, path_sub in ((state, sub), (parent, sub_dest)):
                if path_sub and (owner := owners.setdefault(path_state, extension.name)) != extension.name:
                    message = f"extensions {owner} and {extension.name} both have sub-states of {path_state}"
                    raise ExtensionError(f"{message}, but a request can only be in one sub-state; load one of them")
            if moves.setdefault((trigger, state, sub), sub_dest) != sub_dest:
                message = f"{row}: another row with this source and trigger leads to another sub-state; remove one"
                raise ExtensionError(message)
    return moves


def _path(text: str, row: str) -> tuple[RequestState, str]:
    state, _, sub = text.partition(".")
    if state not in set(RequestState):
        message = f"{row}: {state} is not a phase; use one of {', '.join(RequestState)}, or a sub-state: phase.name"
        raise ExtensionError(message)
    return RequestState(state), sub


def table_fingerprint(regions: Iterable[Region], gating: Gating) -> str:
    """Return the hash of the rows and of the gating. Every log's header contains this hash."""
    rows = [(region.name, *row) for region in regions for row in region.flat()]
    lines = sorted(" ".join(row) for row in (*rows, *gating.rows()))
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()


@attrs.define
class _Model:
    """The state that a reference machine moves. The class is not frozen, because `transitions` sets the attribute."""

    state: str = INITIAL_STATE.value


class ReferenceMachine:
    """The transition tables as machines of the `transitions` library, one for each region.

    They are slow, but independent of the dicts, so audits test the dicts against them.
    """

    def __init__(self, regions: Collection[Region], gating: Gating) -> None:
        self.gating = gating
        self._machines = {
            region.name: Machine(
                model=None,
                states=[state.value for state in region.states],
                transitions=[
                    {"trigger": trigger, "source": source.value, "dest": dest.value}
                    for source, trigger, dest in region.flat()
                ],
                initial=region.initial.value,
                auto_transitions=False,
            )
            for region in regions
        }
        self._region_of = {region.states: region.name for region in regions}
        self._walked: dict[tuple[str, State, str], State | None] = {}
        self._after: dict[tuple[str, tuple[State, ...]], tuple[tuple[State, ...], bool]] = {}

    def names(self, region: str, trigger: str) -> bool:
        """Whether the region has a row for the trigger."""
        return trigger in self._machines[region].events

    def walk(self, region: str, state: State, trigger: str) -> State | None:
        """Return the state that `trigger` leads to from `state`; None if there is no row."""
        step = (region, state, trigger)
        if step not in self._walked:  # the machine has no memory, so the result can be kept
            self._walked[step] = self._walk(*step)
        return self._walked[step]

    def after(self, trigger: str, states: tuple[State, ...]) -> tuple[tuple[State, ...], bool]:
        """Return the states after `trigger`, and whether all regions accept the trigger.

        `states` has one state for each region of a request or job.
        """
        step = (trigger, states)
        if step not in self._after:
            names = [self._region_of[type(state)] for state in states]
            moves = [
                (before, self.walk(name, before, trigger) if self.names(name, trigger) else before)
                for name, before in zip(names, states, strict=True)
            ]
            after = tuple(before if dest is None else dest for before, dest in moves)
            is_legal = None not in {dest for _, dest in moves}
            if not is_legal and isinstance(states[0], RequestState):
                after = (*self.gating.resync.get((states[0], trigger), after[:2]), *after[2:])
            self._after[step] = (after, is_legal)
        return self._after[step]

    def _walk(self, region: str, state: State, trigger: str) -> State | None:
        event = self._machines[region].events.get(trigger)
        if event is None:
            return None
        model = _Model(state.value)
        try:
            event.trigger(model)
        except MachineError:
            return None
        return type(state)(model.state)


def mermaid_diagram(region: Region, events: Mapping[str, type[Event]]) -> str:
    """Return a region's diagram for the docs. It has the rows that change the state.

    A row's label is the trigger, or the event's id if all variants of the event lead from and to the same states.
    """
    triggers: dict[tuple[State, State], list[str]] = {}
    for source, trigger, dest in region.flat():
        if source is not dest:
            triggers.setdefault((source, dest), []).append(trigger)
    lines = ["stateDiagram-v2", f"    [*] --> {region.initial}"]
    lines += [
        f"    {source} --> {dest}: {', '.join(_labels(found, events))}" for (source, dest), found in triggers.items()
    ]
    return "\n".join([*lines, f"    {region.terminal} --> [*]"] if region.terminal else lines)


def _labels(triggers: Sequence[str], events: Mapping[str, type[Event]]) -> Iterable[str]:
    whole = {event.id for event in events.values() if set(triggers_of(event)) <= set(triggers)}
    return dict.fromkeys(
        event_id if (event_id := trigger.partition("/")[0]) in whole else trigger for trigger in triggers
    )
