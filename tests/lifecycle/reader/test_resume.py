"""Reading can stop after an event, be stored, and go on: nobody can tell the difference."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import attrs
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lifecycle_driver import Driver, keys_of, play_seed
from lifecycle_driver.any_events import any_log

from kvledger.lifecycle import Core, LedgerConfiguration, SequencedEvent
from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit import AuditModel
from kvledger.lifecycle.audit.violations import Violations
from kvledger.lifecycle.marks import on
from kvledger.lifecycle.reader import EVERY_PART, Life, Model, NotResumable, Reader, Visitor, visitor
from kvledger.lifecycle.reader.records import NO_PREFIX

CORE = Core.standard()
FINGERPRINT = CORE.fingerprint()


class Counted(msgspec.Struct, forbid_unknown_fields=True):
    """What `Counts` remembers."""

    num_answers: dict[str, int] = {}
    ended: list[tuple[str, int, int]] = []


class Counts(Visitor[Model]):
    """Counts the answers of each request while it lives."""

    needs = tuple(EVERY_PART)
    state: Counted

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.state = Counted()

    @on(e.LookupAnswered)
    def _answered(self, event: e.LookupAnswered) -> None:
        self.state.num_answers[event.request_id] = self.state.num_answers.get(event.request_id, 0) + 1

    def ended(self, life: Life) -> None:
        """Say how many it had."""
        self.state.ended.append((life.request_id, life.ordinal, self.state.num_answers.pop(life.request_id, 0)))


def new_reader(configuration: LedgerConfiguration) -> Reader:
    """Before the first event, with all that any model knows."""
    model = AuditModel(CORE.tables, configuration, Violations())
    return Reader(model, [Counts(model)])


def known(reader: Reader) -> bytes:
    """Everything that it knows."""
    return reader.capture(FINGERPRINT)


def check_resumed_everywhere(
    configuration: LedgerConfiguration, events: Sequence[SequencedEvent], gap: int = 0, stops: int = 7
) -> None:
    """Stop after some events, resume another reader, and compare at each event behind it."""
    whole = new_reader(configuration)
    resumed: list[Reader] = []
    for number, numbered in enumerate(events):
        for reader in (whole, *resumed):
            if gap == numbered[0]:
                reader.lost(gap - 1, gap - 1)
            reader.take([numbered])
        state = known(whole)
        for reader in resumed:
            assert known(reader) == state
        if number % stops == stops - 1:
            another = new_reader(configuration)
            another.resume(state, FINGERPRINT)
            assert known(another) == state
            resumed = [*resumed[-1:], another]
            gc.collect()


@pytest.mark.parametrize(
    "num_moves", [8, pytest.param(40, marks=pytest.mark.long)], ids=lambda number: f"{number} moves"
)
@pytest.mark.parametrize(
    ("seed", "sizes"),
    [
        (2, (8, 16)),
        pytest.param(1, (16, 16), marks=pytest.mark.long),
        pytest.param(3, (32, 16), marks=pytest.mark.long),
    ],
)
def test_a_resumed_reader_knows_at_each_event_what_the_whole_one_knows(
    seed: int, sizes: tuple[int, int], num_moves: int
) -> None:
    """On walks with every kind of event, wherever it stopped."""
    driver = play_seed(seed, num_moves, chunk_size=sizes[0], block_size=sizes[1])
    check_resumed_everywhere(driver.configuration, list(enumerate(driver.observed, 1)))


def test_it_goes_on_behind_a_gap_too() -> None:
    """Lives stay partial."""
    driver = play_seed(5, 8, chunk_size=16, block_size=16)
    log = list(enumerate(driver.observed, 1))
    check_resumed_everywhere(driver.configuration, log, gap=len(log) // 3)


@settings(max_examples=5)
@given(log=any_log())
def test_whatever_a_log_says_it_can_be_stopped_and_resumed(log: tuple[LedgerConfiguration, list[e.Event]]) -> None:
    """Also where observations make no sense."""
    configuration, events = log
    check_resumed_everywhere(configuration, list(enumerate(events, 1)), stops=5)


def test_state_of_another_configuration_or_code_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a reason; it would mean something else."""
    configuration = LedgerConfiguration(16, 16, num_slots=4)
    stored = known(new_reader(configuration))
    with pytest.raises(NotResumable, match="for another configuration or in another layout"):
        new_reader(attrs.evolve(configuration, num_slots=5)).resume(stored, FINGERPRINT)
    with pytest.raises(NotResumable, match="another layout"):
        new_reader(configuration).resume(stored, "another core")
    monkeypatch.setattr(visitor, "hash_of_reader", lambda: "of tomorrow")
    with pytest.raises(NotResumable, match="other code stored it"):
        new_reader(configuration).resume(stored, FINGERPRINT)
    new_reader(configuration).resume(stored, FINGERPRINT, trusts_other_code=True)


def test_what_a_process_did_before_does_not_change_what_is_stored() -> None:
    """Snapshots of one log differed: the set of the keys of no prefix was stored once somebody had asked for it."""
    driver = Driver(async_saves=True)
    driver.start("a", keys_of("a", 2), 33, (1, 2, 3))
    driver.finish("a", 33, 34)
    stored = driver.folded().start().reader
    assert not NO_PREFIX.key_set
    assert driver.folded().start().reader == stored


def test_a_reader_with_fewer_visitors_goes_on_and_one_with_more_does_not() -> None:
    """One state serves whoever asks for a part of it."""
    driver = play_seed(1, 10, chunk_size=16, block_size=16)
    reader = new_reader(driver.configuration)
    reader.take(enumerate(driver.observed, 1))
    model = Model(CORE.tables, driver.configuration)
    Reader(model, ()).resume(known(reader), FINGERPRINT)
    assert known(Reader(model, ()))
    without = driver.folded().start().reader
    with pytest.raises(NotResumable, match="Counts"):
        new_reader(driver.configuration).resume(without, FINGERPRINT)


def test_the_model_of_the_rules_knows_more_than_a_reader_needs() -> None:
    """A reader can go on from its state, and rules not from a reader's."""
    driver = play_seed(2, 40, chunk_size=16, block_size=16)
    stored = driver.folded().start().reader
    model = Model(CORE.tables, driver.configuration)
    Reader(model, ()).resume(stored, FINGERPRINT)
    plain = known(Reader(model, ()))
    audited = AuditModel(CORE.tables, driver.configuration, Violations())
    with pytest.raises(NotResumable, match="room"):
        Reader(audited, ()).resume(plain, FINGERPRINT)


@settings(max_examples=40)
@given(data=st.data())
def test_damaged_state_is_refused_and_never_raises_anything_else(data: st.DataObject) -> None:
    """Bytes that are cut or changed."""
    driver = play_seed(1, 10, chunk_size=16, block_size=16)
    reader = new_reader(driver.configuration)
    reader.take(enumerate(driver.observed, 1))
    stored = bytearray(known(reader))
    at = data.draw(st.integers(0, len(stored) - 1))
    if data.draw(st.booleans()):
        del stored[at:]
    else:
        stored[at] ^= data.draw(st.integers(1, 255))
    another = new_reader(driver.configuration)
    try:
        another.resume(bytes(stored), FINGERPRINT)
    except NotResumable:
        return
    known(another)
