"""What the audit knows of a log: folded once for all checkers, from observations and recorded decisions alone."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from kvledger.lifecycle import events as e
from kvledger.lifecycle import machine
from kvledger.lifecycle.audit.model.answers import Answers
from kvledger.lifecycle.audit.model.chunks import Chunks
from kvledger.lifecycle.audit.model.costs import Costs
from kvledger.lifecycle.audit.model.forgotten import Forgotten
from kvledger.lifecycle.audit.model.jobs import JobsInFlight
from kvledger.lifecycle.audit.model.lives import Lives
from kvledger.lifecycle.audit.model.moment import EventChecks, Moment
from kvledger.lifecycle.audit.model.records import Life
from kvledger.lifecycle.audit.model.room import Room
from kvledger.lifecycle.audit.model.slots import Slots
from kvledger.lifecycle.audit.model.spans import Spans
from kvledger.lifecycle.audit.model.start import Start
from kvledger.lifecycle.audit.model.tables import Tables
from kvledger.lifecycle.audit.model.tails import Tails
from kvledger.lifecycle.audit.violations import Violations
from kvledger.lifecycle.configuration import LedgerConfiguration
from kvledger.lifecycle.events import NO_SLOT
from kvledger.lifecycle.marks import marked


@attrs.frozen
class Model:
    """The audit's own state. It contains an event before any checker is asked about it."""

    configuration: LedgerConfiguration
    spans: Spans
    request_events: Sequence[type[e.RequestEvent]]
    """The events in the life of one request."""
    violations: Violations
    """What checkers found."""
    moment: Moment
    forgotten: Forgotten
    lives: Lives
    tables: Tables
    jobs: JobsInFlight
    slots: Slots
    chunks: Chunks
    tails: Tails
    answers: Answers
    room: Room
    costs: Costs

    @classmethod
    def of(
        cls,
        tables: machine.Tables,
        configuration: LedgerConfiguration,
        violations: Violations,
    ) -> Model:
        """Before the first event."""
        spans = Spans(configuration.block_size, configuration.chunk_size, configuration.windows)
        moment, slots = Moment(), Slots(configuration.num_slots)
        forgotten = Forgotten()
        lives = Lives(tables, spans.chunk_size, moment)
        jobs = JobsInFlight(lives, spans, configuration.num_ranks, moment)
        chunks = Chunks(jobs, spans, slots, moment)
        keeps = configuration.keep_for_preempted
        answers = Answers(lives, spans.chunk_size, moment, forgotten, keep_for_preempted=keeps)
        return cls(
            configuration=configuration,
            spans=spans,
            request_events=tables.request_events,
            violations=violations,
            moment=moment,
            forgotten=forgotten,
            lives=lives,
            tables=Tables(lives, spans, moment),
            jobs=jobs,
            slots=slots,
            chunks=chunks,
            tails=Tails(lives, slots, moment, spans.chunk_size),
            answers=answers,
            room=Room(lives, jobs, chunks, answers, moment),
            costs=Costs(lives),
        )

    def usable_tokens(self, life: Life, num_hit_tokens: int) -> int:
        """How much of a hit the configuration lets the request use."""
        share = self.configuration.max_hit_share
        return num_hit_tokens if share >= 1 else min(num_hit_tokens, int(life.num_prompt_tokens * share))

    def is_slower_to_load(self, answer: e.LookupAnswered, num_usable_tokens: int) -> bool:
        """Whether the answer at hand offers nothing of what can be used, because computing it costs less."""
        is_more = min(num_usable_tokens, answer.num_tokens - 1) > answer.num_computed_tokens
        return is_more and self.costs.is_slower and not self.configuration.offers_slow_loads

    def longest_seen(self, life: Life, num_tokens: int) -> int:
        """The longest prefix of so many tokens after which all is stored that the windows of the next token see."""
        spans, chunks, tail = self.spans, self.chunks, self.tails.saved(life)

        def is_stored(page: int, end_token: int) -> bool:
            # The last of these tokens that the page holds tells which chunk's image of the page is long enough.
            last_token = min(end_token, spans.tokens_of_page(page).stop) - 1
            (chunk,) = spans.chunks_of(range(last_token, last_token + 1))
            slots = chunks.slots_of(life.keys[chunk]) if chunk < len(life.keys) else None
            if slots is not None and slots[page - spans.pages_of_chunk(chunk).start] != NO_SLOT:
                return True
            if tail is None or end_token > tail.end_token:
                return False
            place = page - spans.pages_of(range(tail.first_token, tail.end_token)).start
            return 0 <= place < len(tail.slots) and tail.slots[place] != NO_SLOT

        return spans.longest_seen(num_tokens, is_stored)

    def begin(self, start: Start) -> None:
        """Take over what is known where an audit starts in the middle of a log."""
        self.lives.begin(start)
        self.tables.begin(start)
        self.jobs.begin(start)
        self.chunks.begin(start)
        self.tails.begin(start)
        self.answers.begin(start)
        self.room.begin(start)
        self.costs.begin(start)

    def folds(self) -> EventChecks:
        """(event class, fold), to be done before the checks of that class."""
        # First whom it concerns; then who computed before it; blocks and tails, which ask whose they are; then the
        # lives, which may be over; the jobs before the chunks, which ask what was saved;
        # then what may leave of them.
        folded = (
            *(self.forgotten, self.costs, self.tables, self.tails, self.answers),
            *(self.lives, self.jobs, self.chunks, self.room),
        )
        return [*self.lives.meetings(), *(fold for each in folded for fold in marked(each))]
