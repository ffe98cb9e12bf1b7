# ruff: noqa: S101 - this is a test suite, shipped so that an extension written elsewhere can inherit it
"""Contract tests for extensions: inherit `ExtensionContract` in a test module and create your extension in it.

    class TestMyExtension(ExtensionContract):
        settings = {"limit": 1}
        def make_extension(self): return MyExtension()
        def payloads(self): return [Said(1)]
        def bad_log(self, rule): return self.walked(Careless())

Verified:

- A core accepts the extension.
- Its decisions, its folded states and the chunks that it keeps follow from the log.
- Its rules find logs that break them, and find nothing in good logs.
- Readers without the extension can read its logs, and verify everything in them that does not need the extension.

Not verified: whether the extension is useful.
"""

from __future__ import annotations

import abc
import itertools
from collections.abc import Iterable, Mapping
from typing import ClassVar

import attrs
import msgspec

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit import Audit
from kvledger.lifecycle.codec import EventDecoder, encode_events, vocabulary_header
from kvledger.lifecycle.configuration import ConfigurationError, LedgerConfiguration
from kvledger.lifecycle.core import Core
from kvledger.lifecycle.extension import Extension
from kvledger.lifecycle.projections import Projections
from kvledger.lifecycle.replay import Replay, SequencedEvent, batches, fold
from kvledger.lifecycle.snapshots import capture, restore
from kvledger.lifecycle.testing.plays import CONFIGURATIONS, OBSERVED, Play, plays

_EVENTS_BETWEEN_SNAPSHOTS = 7


class ExtensionContract(abc.ABC):
    """Tests that every extension must pass."""

    settings: ClassVar[Mapping[str, bool | float | str]] = {}
    """Settings for the tests. The extension should act with them in `Play.walk`, which preempts requests."""
    configurations: ClassVar[tuple[LedgerConfiguration, ...]] = CONFIGURATIONS

    @abc.abstractmethod
    def make_extension(self) -> Extension:
        """Return a new instance of your extension."""

    def payloads(self) -> Iterable[msgspec.Struct]:
        """Return at least one payload for each of the extension's events."""
        return ()

    def bad_log(self, rule: str) -> Play:
        """Return a play whose log breaks the rule, for example `walked` with a broken extension."""
        message = f"{rule}: there is no log that breaks this rule; override `bad_log` to return one"
        raise NotImplementedError(message)

    def walked(self, extension: Extension, configuration: LedgerConfiguration = CONFIGURATIONS[0]) -> Play:
        """Return a play in which a core with the extension has run `Play.walk`."""
        play = Play(Core.standard().extended(extension), self._configured(configuration))
        play.walk()
        return play

    def test_loaded_twice_is_loaded_once(self) -> None:
        """A core accepts the extension, and treats a second instance as the same extension.

        The rows of its sub-states lead to the same phases as the core's rows.
        """
        core = self._core()
        assert core.extended(self.make_extension()) is core

    def test_its_events_are_read_back_with_it_and_unpacked_without_it(self) -> None:
        """Readers without the extension's classes can read the names and values of the fields of its events."""
        extension, core = self.make_extension(), self._core()
        payloads = tuple(self.payloads())
        assert {type(payload) for payload in payloads} == set(extension.events.values()), (
            "`payloads` does not return every event"
        )
        events = [extension.observed("a", payload, 0) for payload in payloads]
        for reader in (core, _without(core)):
            assert EventDecoder(reader, vocabulary_header(core)).decode(encode_events(events)) == events
        for payload, event in zip(payloads, events, strict=True):
            assert extension.payload_of(event) == payload
            assert isinstance(extension.words(payload), str | None)
            assert all(isinstance(amount, int) for amount in extension.figures(payload).values())
            assert isinstance(extension.under_way(event), str | None)
            assert all(isinstance(line, str) for line in extension.evidence([(1, event)], self.configurations[0]))
            assert msgspec.msgpack.decode(event.payload) == msgspec.to_builtins(payload)

    def test_it_decides_what_it_may_in_every_state_and_the_same_again(self) -> None:
        """The extension never raises, its decisions are not refused, and a new instance makes the same decisions."""
        extension, core, another = self.make_extension(), self._core(), self._core()
        decoder = EventDecoder(core, vocabulary_header(core))
        observed = [
            *OBSERVED,
            *(lambda play, said=said: [extension.observed("a", said, play.now)] for said in self.payloads()),
        ]
        played = plays(core, map(self._configured, self.configurations), observed=observed)
        for play in itertools.chain(self._walks(), played):
            for event in play.events:
                assert not isinstance(event, e.ExtensionStopped), f"{play.name}: {event}"
            read = decoder.decode(encode_events(play.events))
            assert read == play.events, play.name
            projections = another.new_projections(play.configuration)
            for batch in batches(enumerate(read, 1)):
                replay = Replay(another, play.configuration, start=projections)
                replay.run(batch)
                assert not replay.divergences, f"{play.name}: {replay.divergences[0]}"

    def test_what_it_folds_follows_from_the_log_and_from_a_snapshot_in_its_middle(self) -> None:
        """Projections have the same state after a fold, a second fold, and a fold that continues from a snapshot."""
        for play in self._walks():
            core, events = play.ledger.core, _sequenced(play)
            stopped = [event for event in play.events if isinstance(event, e.ExtensionStopped)]
            assert not stopped, f"{play.name}: {stopped[0]}"
            begun = [core.new_projections(play.configuration)]
            for begin in range(0, len(events), _EVENTS_BETWEEN_SNAPSHOTS):
                begun.append(restore(core, capture(begun[0]), play.configuration))
                for projections in begun[1:]:
                    _assert_equal(projections, begun[0], f"before event {begin + 1} of {play.name}")
                for projections in begun:
                    fold(core, events[begin : begin + _EVENTS_BETWEEN_SNAPSHOTS], play.configuration, start=projections)
            _assert_equal(begun[0], play.ledger.projections, f"folded again, {play.name}")

    def test_its_rules_are_silent_where_all_is_well(self) -> None:
        """In `Play.walk`, no rule finds anything, and a replay makes the same decisions."""
        for play in self._walks():
            audit = _audited(play, self._core())
            not_judged = audit.judgement().not_judged
            assert not not_judged, f"{play.name}: {not_judged}"
            assert audit.is_sound, f"{play.name}: {audit.violations[:3]}, {audit.divergences[:3]}, {audit.unfoldable}"

    def test_each_of_its_rules_finds_what_breaks_it(self) -> None:
        """Each rule of the extension finds a breach in the log that `bad_log` returns for the rule."""
        core = self._core()
        for rule in self.make_extension().rules:
            found = _audited(self.bad_log(rule), core).num_violations
            assert found[rule], f"{rule} finds nothing in its bad log; the audit found {dict(found)}"

    def test_settings_that_it_does_not_have_are_refused(self) -> None:
        """The error names extension and setting. A value of another type than the setting's default is refused too."""
        core, extension = self._core(), self.make_extension()
        core.check_settings({extension.name: self.settings})
        core.check_settings({extension.name: extension.settings})
        refused: dict[str, bool | float | str] = {"no such setting": 1}
        refused |= {key: 1 if isinstance(default, str) else "text" for key, default in extension.settings.items()}
        for key, value in refused.items():
            refusal = _refusal(core, {extension.name: {key: value}})
            assert refusal.startswith("extension_settings"), refusal
            assert extension.name in refusal, refusal
            assert key in refusal, refusal

    def test_a_reader_without_it_verifies_the_rest(self) -> None:
        """A reader without the extension moves sub-states by the rows in the log's header.

        The core's projections then have the same states as with the extension.
        """
        name = self.make_extension().name
        for play in self._walks():
            core = _without(play.ledger.core)
            assert [extension.name for extension in core.absent] == [name]
            audit = _audited(play, core)
            assert audit.is_sound, f"{play.name}: {audit.violations[:3]}, {audit.divergences[:3]}, {audit.unfoldable}"
            states = play.ledger.projections.snapshot()
            assert audit.projections.snapshot().items() <= states.items(), play.name

    def _core(self) -> Core:
        return Core.standard().extended(self.make_extension())

    def _configured(self, configuration: LedgerConfiguration) -> LedgerConfiguration:
        return attrs.evolve(configuration, extensions={self.make_extension().name: self.settings})

    def _walks(self) -> Iterable[Play]:
        return (self.walked(self.make_extension(), configuration) for configuration in self.configurations)


def _without(core: Core) -> Core:
    return Core.standard().reading(vocabulary_header(core))


def _refusal(core: Core, settings: Mapping[str, Mapping[str, bool | float | str]]) -> str:
    try:
        core.check_settings(settings)
    except ConfigurationError as error:
        return str(error)
    return f"{settings} was not refused"


def _sequenced(play: Play) -> list[SequencedEvent]:
    return list(enumerate(play.events, 1))


def _audited(play: Play, core: Core) -> Audit:
    audit = Audit(core, play.configuration)
    audit.run(_sequenced(play))
    return audit


def _assert_equal(one: Projections, other: Projections, when: str) -> None:
    states, others = one.snapshot(), other.snapshot()
    different = [name for name in others if states.get(name) != others[name]]
    assert not different, f"{when}: {', '.join(different)} differ"
    kept = [_kept(projections) for projections in (one, other)]
    assert kept[0] == kept[1], f"{when}: other chunks are kept"


def _kept(projections: Projections) -> list[bytes]:
    keeps = projections.keeper()
    return [] if keeps is None else list(filter(keeps, projections.pool))
