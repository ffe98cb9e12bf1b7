"""What the accounts remember of one life of a request. Everything in it comes from events; nothing is decided here."""

from __future__ import annotations

import attrs

from kvledger.adapters.tools.reasons.chunk_history import ChunkFact
from kvledger.adapters.tools.reasons.reason import Reason
from kvledger.adapters.tools.reasons.request_history import Admission, RequestHistory
from kvledger.adapters.tools.reasons.sums import Sums
from kvledger.lifecycle import events as e

UNBORN = -1
"""The ordinal of a request whose arrival is not in the log."""


@attrs.define
class Tail:
    """The part-filled last chunk of a preempted request, and what became of its copy."""

    first_token: int
    end_token: int
    fact: ChunkFact
    before_reset: int = 0
    """The last reset of vLLM's prefix cache alone that came after it was computed; 0 if there is none."""


@attrs.define
class Answer:
    """An answered lookup that no allocation has claimed."""

    sequence: int
    event: e.LookupAnswered


@attrs.define
class Life:
    """From an arrival to the release, or until the id is used again."""

    request_id: str
    ordinal: int = UNBORN
    num_prompt_tokens: int = 0
    generation: int = 0
    num_preemptions: int = 0
    mark: int = 0
    """The most settled tokens that a preemption took: what lies below and is computed again is recomputed."""
    keys: dict[int, bytes] = attrs.field(factory=dict)
    tail: Tail | None = None
    answer: Answer | None = None
    last_lookup: e.LookupAnswered | e.LookupDeferred | None = None
    """Since it was last given blocks."""
    admission: Admission | None = None
    allocated_without_answer: int = 0
    """Sequence of an allocation that no lookup preceded; the step that starts from it has the rest."""
    is_computing: bool = False
    deferrals: tuple[int, ...] = ()
    """First and last `lookup.deferred` in a row."""
    num_deferred: int = 0
    undelivered: int = 0
    """Tokens claimed for which no load has been issued."""
    undelivered_sequence: int = 0
    quarantined: tuple[int, ...] = ()
    """`request.quarantined` and its cause."""
    withheld: int = 0
    """The `decision.withheld` that took back what its last lookup was answered."""
    hook_failed: int = 0
    broken_rule: int = 0
    """The last `invariant.violated`."""
    preempted: int = 0
    reset: int = 0
    """The reset that came while it held blocks, so that nothing in them may be saved; 0 once it got others."""
    load_failed: tuple[int, ...] = ()
    """The last `load.failed` and its cause."""
    computed_end: int = 0
    """How far steps say that it computed since it was admitted."""
    taken_back_from: int = 0
    """How far it had computed when the scheduler took tokens back."""
    taken_back: tuple[int, ...] = ()
    taken_back_reason: Reason = Reason.ROLLED_BACK
    sums: Sums = attrs.field(factory=Sums)
    """What is counted of this life; once it is over, those of the whole log."""
    history: RequestHistory | None = None
    """Its history, where it is kept."""

    def cut_keys(self, first_chunk: int) -> None:
        """Forget the keys from a chunk on."""
        if first_chunk == 0:
            self.keys.clear()
        else:
            for chunk in [chunk for chunk in self.keys if chunk >= first_chunk]:
                del self.keys[chunk]
