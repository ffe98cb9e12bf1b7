"""Groups what is wrong in a log into findings, one for each cause. Each fault in a finding is called a breach.

- A finding begins with a breach about one life of a request. Later breaches about this life belong to the same finding.
  So do breaches about other requests at the same observation as the first breach.
- A divergence belongs to the finding about its life or its observation. All other divergences of decisions form one
  finding, because one change of the code explains all of them.
- Breaches about no request form one finding if they break the same rule and their texts differ only in numbers.

`verify`, the HTML page and the Python API count findings with this module. `docs/decisions/0069` has the reasons.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import attrs
import msgspec

from kvledger.adapters.tools.logs.describe import sentence, value_text, without_numbers
from kvledger.adapters.units import duration, event_range
from kvledger.lifecycle import Core, Divergence
from kvledger.lifecycle.audit import Judgement, Violation
from kvledger.lifecycle.events import NO_LIFE


@attrs.define
class Breach:
    """A broken rule, divergence or other fault. Faults whose texts differ only in numbers are counted as one breach."""

    what: str
    detail: str
    sequence: int | None = None
    """Sequence number of the first event with this breach; None: unknown."""
    time_ns: int = 0
    request_id: str = ""
    generation: int | None = None
    evidence: Sequence[int] = ()
    """Sequence numbers of the events that show the first occurrence of the breach."""
    num_times: int = 1
    last_sequence: int = attrs.field(default=attrs.Factory(lambda breach: breach.sequence, takes_self=True))
    last_ns: int = attrs.field(default=attrs.Factory(lambda breach: breach.time_ns, takes_self=True))

    @property
    def title(self) -> str:
        """What is wrong, at which events, how often, and for which request."""
        return f"{self._place}{self._whose}"

    def text_after(self, first: Breach) -> str:
        """Return the title and the detail. Leave out the request if `first` is about the same request."""
        title = self._place if self._whose == first._whose else self.title
        return f"{title}: {self.detail}" if self.detail else title

    @property
    def _place(self) -> str:
        if self.sequence is None:
            return self.what
        many = "s" * (self.last_sequence != self.sequence)
        took = f" in {duration(self.last_ns - self.time_ns)}" if self.last_ns > self.time_ns else ""
        times = f", {self.num_times} times{took}" if self.num_times > 1 else ""
        return f"{self.what} at event{many} {event_range(self.sequence, self.last_sequence)}{times}"

    @property
    def _whose(self) -> str:
        generation = "" if self.generation is None else f", generation {self.generation}"
        return f", request {self.request_id}{generation}" if self.request_id else ""


@attrs.frozen
class Finding:
    """The breaches that, as far as the log shows, have the same cause. They are in the order of the log."""

    breaches: list[Breach]

    @property
    def first(self) -> Breach:
        """The breach with which the finding begins."""
        return self.breaches[0]

    @property
    def text(self) -> str:
        """The first breach, in words."""
        return f"{self.first.title}: {self.first.detail}" if self.first.detail else self.first.title

    @property
    def follows(self) -> list[str]:
        """The later breaches, in words."""
        return [breach.text_after(self.first) for breach in self.breaches[1:]]


@attrs.frozen
class FindingList:
    """The findings of a log, in the order of their first events; findings without an event come first."""

    findings: Sequence[Finding] = ()
    num_uncollected: int = 0
    """Breaches that were counted but not kept. It is unknown to which findings they belong."""
    _of: dict[int, Finding] = attrs.field(factory=dict)

    def first_sequence(self, item: object) -> int:
        """Return the sequence number at which the finding with this violation or divergence begins; 0 if unknown."""
        return self._of[id(item)].first.sequence or 0

    @classmethod
    def of(cls, judgement: Judgement, core: Core, others: Iterable[Breach]) -> FindingList:
        """Return the findings of an audit, and one finding for each of `others`."""
        folding = _Folding()
        for violation in judgement.violations:
            folding.add_violation(violation)
        different = (
            ("a decision differs", judgement.divergences),
            ("the reference machine differs", judgement.reference_differences),
        )
        for what, divergences in different:
            for divergence in divergences:
                folding.add_divergence(what, divergence, core)
        if (unfoldable := judgement.unfoldable) is not None:
            what = f"{unfoldable.event.id} cannot be folded"
            breach = Breach(what, unfoldable.error, unfoldable.sequence, evidence=[unfoldable.sequence])
            folding.add(unfoldable, breach, what, unfoldable.sequence, what)
        for finding in folding.findings:
            finding.breaches.sort(key=lambda breach: breach.sequence or 0)
        findings = [*(Finding([each]) for each in others), *folding.findings]
        findings.sort(key=lambda finding: finding.first.sequence or 0)
        counted = sum(judgement.num_violations.values()) + sum(each.num_found for _, each in different)
        kept = len(judgement.violations) + sum(len(each) for _, each in different)
        return cls(findings, counted - kept, folding.of)


class _Folding:
    def __init__(self) -> None:
        self.of: dict[int, Finding] = {}
        """`id` of a violation or divergence → its finding."""
        self.findings: list[Finding] = []
        self._by_life: dict[Hashable, Finding] = {}
        self._by_observation: dict[int, Finding] = {}
        self._alike: dict[tuple[int, Hashable, str, str], Breach] = {}
        """(`id` of the finding, life, what is wrong, text without numbers) → breach that counts the repetitions."""

    def add_violation(self, violation: Violation) -> None:
        shown = [*dict.fromkeys((*violation.evidence, violation.sequence))]
        whose = (violation.request_id, violation.generation)
        breach = Breach(violation.rule, violation.detail, violation.sequence, violation.time_ns, *whose, shown)
        life = _life(violation.ordinal, violation.request_id) or (violation.rule, without_numbers(violation.detail))
        self.add(violation, breach, life, violation.cause)

    def add_divergence(self, what: str, divergence: Divergence, core: Core) -> None:
        event = divergence.recorded or divergence.decided
        request_id, ordinal = getattr(event, "request_id", ""), getattr(event, "ordinal", NO_LIFE)
        generation = None if ordinal == NO_LIFE else getattr(event, "generation", None)
        detail = difference_text(divergence, core)
        breach = Breach(what, detail, divergence.sequence, 0, request_id, generation)
        life = _life(None if ordinal == NO_LIFE else ordinal, request_id)
        self.add(divergence, breach, life, getattr(event, "cause", divergence.sequence), what)

    def add(self, item: object, breach: Breach, life: Hashable, observation: int, otherwise: Hashable = None) -> None:
        """Add a breach to the finding about its life or its observation.

        `otherwise`: key of a finding for all breaches without such a finding; None: begin a new finding.
        """
        finding = self._by_life.get(life) or self._by_observation.get(observation) or self._by_life.get(otherwise)
        if finding is None:
            finding = Finding([])
            self.findings.append(finding)
            if otherwise is None:
                self._by_observation.setdefault(observation, finding)
            else:
                self._by_life[otherwise] = finding
        if otherwise is None:
            self._by_life.setdefault(life, finding)
        self.of[id(item)] = finding
        same = self._alike.setdefault((id(finding), life, breach.what, without_numbers(breach.detail)), breach)
        if same is breach:
            finding.breaches.append(breach)
        else:
            same.num_times += 1
            same.last_sequence, same.last_ns = breach.last_sequence, breach.last_ns


def difference_text(divergence: Divergence, core: Core) -> str:
    """Return in words what the log has and what this code decides.

    If both events have the same class, the text names only the fields that differ.
    """
    recorded, decided = divergence.recorded, divergence.decided
    if recorded is None or decided is None or type(recorded) is not type(decided):
        has, makes = ("nothing" if event is None else sentence(event, core) for event in (recorded, decided))
        return f"the log has “{has}”, this code decides “{makes}”"
    before, after = msgspec.structs.asdict(recorded), msgspec.structs.asdict(decided)
    changed = [
        f"{name} is {value_text(value)} in the log and {value_text(after[name])} when decided again"
        for name, value in before.items()
        if value != after[name]
    ]
    return f"{recorded.id}: {', '.join(changed)}"


def _life(ordinal: int | None, request_id: str) -> Hashable:
    """Return a key for a life, or for a request whose life is unknown. Return None if there is no request id."""
    return (request_id, ordinal) if request_id else None
