"""Extensions of who only records: somebody else decides, and rules about decisions of the core's are left out."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
import pytest
from lifecycle_driver import Driver, keys_of

from kvledger.lifecycle import Core, CoreError, Extension, MissReason, RequestState, StateHandler, Turn
from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit import Audit
from kvledger.lifecycle.codec import vocabulary_header

STANDARD = Core.standard()
WHY = "whoever answers here is held to other rules"


class Answered(msgspec.Struct, frozen=True):
    """What somebody else answered."""

    num_external_tokens: int


class Heard(msgspec.Struct, frozen=True):
    """What concerns the engine."""

    seconds: int


class Silent(StateHandler):
    """Says of a lookup what somebody else has said."""

    state = RequestState.NEW

    def extension_observed(self, turn: Turn, event: e.ExtensionObserved) -> None:
        """Say it in the core's words."""
        said = Listening.payload_of(event)
        assert isinstance(said, Answered)
        asked = (0, turn.record.num_prompt_tokens)
        hit = said.num_external_tokens
        turn.decide(e.LookupAnswered(*turn.record.life, *asked, hit, hit, False, MissReason.RECORDED, turn.cause))


class Listening(Extension):
    """Decides nothing about new requests but what it has heard."""

    name = "listening"
    events: ClassVar[dict[str, type[msgspec.Struct]]] = {"answered": Answered, "heard": Heard}
    replaces = (Silent,)
    leaves_out: ClassVar[dict[str, str]] = {"LAST_TOKEN": WHY, "LOOKUP_PURE": WHY}


CORE = STANDARD.extended(Listening())


def changed(**parts: Any) -> Extension:
    """The extension with other parts."""
    kind = type("Changed", (Listening,), parts)
    extension: Extension = kind()
    return extension


def a_wrong_answer() -> Driver:
    """All tokens are offered, where one must be left to compute."""
    driver = Driver(chunk_size=16, core=CORE)
    driver.arrive("a", 48, keys_of("a", 3))
    driver.observe(e.LookupRequested("a", 0, 48, 1))
    driver.observe(Listening.observed("a", Answered(48), 2))
    driver.observe(Listening.noted(Heard(3), 3))
    driver.ledger.commit()
    return driver


def audited(driver: Driver, core: Core) -> Audit:
    """The driver's log, audited with a core."""
    audit = Audit(core, driver.configuration)
    audit.run(driver.sink.events())
    return audit


def test_its_handlers_decide_in_the_places_of_the_cores() -> None:
    """The core's own answer to the lookup is not given beside theirs."""
    (answer,) = a_wrong_answer().all_of(e.LookupAnswered)
    assert (answer.num_external_tokens, answer.miss_reason) == (48, "recorded")


def test_a_rule_that_is_left_out_does_not_judge_and_the_reason_is_told() -> None:
    """LAST_TOKEN would name the answer where it judges; no other rule is lost."""
    driver = a_wrong_answer()
    audit = audited(driver, CORE)
    assert audit.is_sound, (audit.violations, audit.divergences)
    assert CORE.not_checked == {**STANDARD.not_checked, "LAST_TOKEN": WHY, "LOOKUP_PURE": WHY}
    assert STANDARD.rules.keys() - CORE.rules.keys() == {"LAST_TOKEN", "LOOKUP_PURE"}
    judging = STANDARD.extended(changed(leaves_out={}))
    assert {violation.rule for violation in audited(driver, judging).violations} == {"LAST_TOKEN"}


def test_a_reader_without_its_code_leaves_the_same_rules_out_and_judges_no_decision_of_its_states() -> None:
    """What the header says stands in; new requests are its own, other states the core's."""
    core = STANDARD.reading(vocabulary_header(CORE))
    assert [extension.name for extension in core.absent] == ["listening"]
    assert core.not_checked == CORE.not_checked
    audit = audited(a_wrong_answer(), core)
    assert audit.is_sound, (audit.violations, audit.divergences)
    assert audit.judgement().num_unjudged == 3, "its arrival, its lookup and the answer"
    assert (e.RequestPreempted, RequestState.NEW) in core.unjudged
    assert (e.RequestPreempted, RequestState.RUNNING) not in core.unjudged


def test_a_rule_of_the_same_name_stands_in_and_a_reader_without_its_code_says_so() -> None:
    """The core's rule would judge by what the extension has replaced."""
    own = STANDARD.rules["STEP_SUM"]
    with_its_own = STANDARD.extended(changed(leaves_out={"LOOKUP_PURE": ""}, rules={"LOOKUP_PURE": own}))
    assert with_its_own.rules["LOOKUP_PURE"] is own
    assert "LOOKUP_PURE" not in with_its_own.not_checked
    without = STANDARD.reading(vocabulary_header(with_its_own))
    assert "LOOKUP_PURE" not in without.rules
    assert "listening checks this rule in its own way" in without.not_checked["LOOKUP_PURE"]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            {"leaves_out": {"LAST_TOKENS": WHY}},
            "leaves out LAST_TOKENS, which is not a rule of this core; correct the name of the rule",
        ),
        (
            {"leaves_out": {"LAST_TOKEN": ""}},
            "rule LAST_TOKEN is not checked, with the reason ''; give a reason in words",
        ),
        ({"leaves_out": ("LAST_TOKEN",)}, "leaves_out are .*; use a mapping"),
        ({"rules": {"TABLE_EQ": STANDARD.rules["TABLE_EQ"]}}, "the core has a rule TABLE_EQ already"),
        ({"replaces": Silent}, "replaces are .*; use a tuple"),
        ({"replaces": (Silent, Silent)}, "would both replace the handler of state new"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(parts: dict[str, Any], message: str) -> None:
    """When the core is composed."""
    with pytest.raises(CoreError, match=message):
        STANDARD.extended(changed(**parts))


def test_what_is_noted_of_the_engine_concerns_no_request() -> None:
    """Nothing is decided upon it; it is read back, and counted as an event of an extension."""
    driver = a_wrong_answer()
    (noted,) = driver.all_of(e.ExtensionNoted)
    assert Listening.payload_of(noted) == Heard(3)
    assert driver.observed[-1] is noted
    assert driver.totals.figures.num_extension_events == 2
