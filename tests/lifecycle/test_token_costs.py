"""What loading and computing cost is measured while serving, and a load that costs more is not offered."""

from __future__ import annotations

import pytest
from lifecycle_driver import Driver, keys_of

from kvledger.lifecycle import events as e
from kvledger.lifecycle.projections.costs import MIN_LOADS, MIN_SAMPLES, NUM_STEPS, PAUSE_NS

NUM_TOKENS = 32
"""Of the prefix that everybody asks for: two blocks."""
NUM_PROMPT_TOKENS = 32_000
"""Of the request that always computes."""
NS_A_TOKEN = 50_000
SAVED = keys_of("d", 4)


class Server(Driver):
    """Somebody always computes; a prefix is saved, and others ask for it."""

    def __init__(self, *, offers_slow_loads: bool = False) -> None:
        super().__init__(num_slots=64, offers_slow_loads=offers_slow_loads)
        self.save_prefix("earlier", SAVED)
        self.admit("busy", (), NUM_PROMPT_TOKENS, range(2000, 2000 + NUM_PROMPT_TOKENS // 16))
        self._num_asked = 0
        self.num_computed = 0

    def compute(
        self, num_samples: int = MIN_SAMPLES, ns_a_token: int = NS_A_TOKEN, held_up_ns: tuple[int, ...] = ()
    ) -> None:
        """Steps of different sizes, whose time grows with their tokens; the first ones may be held up by others."""
        for number in range(num_samples * NUM_STEPS + 1):
            num_tokens = 100 * (1 + number // NUM_STEPS % 3)
            self.step(("busy", self.num_computed, num_tokens, NUM_PROMPT_TOKENS))
            self.num_computed += num_tokens
            self.pass_ns(1_000_000 + num_tokens * ns_a_token + sum(held_up_ns[number : number + 1]))

    def ask(self) -> e.LookupAnswered:
        """Somebody new asks for the prefix."""
        self._num_asked += 1
        self.arrive(f"r{self._num_asked}", NUM_TOKENS + 1, SAVED)
        return self.lookup(f"r{self._num_asked}", 0, NUM_TOKENS + 1)

    def load(self, ns_a_token: float) -> e.LookupAnswered:
        """Somebody new asks for it, is given it, and ends."""
        answer = self.ask()
        request_id = f"r{self._num_asked}"
        issued = self.allocate(request_id, (10, 11, 12), answer.num_external_tokens)
        for job in issued:
            if isinstance(job, e.LoadIssued):
                self.report(job.job_id, duration_ns=int(job.num_tokens * ns_a_token))
        self.finish(request_id, 0, NUM_TOKENS + 1)
        return answer


def serving(ns_a_token_loaded: float, *, num_loads: int = MIN_LOADS, offers_slow_loads: bool = False) -> Server:
    """A server that has measured both costs."""
    server = Server(offers_slow_loads=offers_slow_loads)
    server.compute()
    for _ in range(num_loads):
        assert server.load(ns_a_token_loaded).num_external_tokens == NUM_TOKENS
    return server


def offered(answer: e.LookupAnswered) -> tuple[int, str]:
    """How much, and why no more."""
    return answer.num_external_tokens, answer.miss_reason


ALL = NUM_TOKENS, "complete"
NOTHING = 0, "slower"


@pytest.mark.parametrize(("of_computing", "expected"), [(0.1, ALL), (1.2, ALL), (1.3, NOTHING), (50, NOTHING)])
def test_a_load_that_costs_clearly_more_than_computing_is_not_offered(
    of_computing: float, expected: tuple[int, str]
) -> None:
    """What is there is found and recorded all the same; and the audit, which measures apart, says the same."""
    server = serving(of_computing * NS_A_TOKEN)
    answer = server.ask()
    assert offered(answer) == expected
    assert answer.num_hit_tokens == NUM_TOKENS
    audit = server.audited()
    assert audit.violations == []
    assert not list(audit.divergences)


def test_a_preempted_request_computes_again_what_would_take_longer_to_load() -> None:
    """And does not wait for its own saves either."""
    server = serving(50 * NS_A_TOKEN)
    server.start("a", SAVED, NUM_TOKENS + 1, (20, 21, 22))
    server.preempt("a", NUM_TOKENS)
    assert offered(server.lookup("a", 0, NUM_TOKENS + 1)) == NOTHING


def test_a_request_that_would_get_nothing_anyway_is_told_the_usual_reason() -> None:
    """Computed by vLLM's own cache already, or never saved."""
    server = serving(50 * NS_A_TOKEN)
    server.arrive("cached", NUM_TOKENS + 1, SAVED)
    assert server.lookup("cached", NUM_TOKENS, NUM_TOKENS + 1).miss_reason == "complete"
    server.arrive("unknown", NUM_TOKENS + 1, keys_of("other", 4))
    assert server.lookup("unknown", 0, NUM_TOKENS + 1).miss_reason == "missing"


def test_where_slow_loads_are_offered_nothing_is_measured_against_anything() -> None:
    """As `offer` "always" says."""
    assert offered(serving(50 * NS_A_TOKEN, offers_slow_loads=True).ask()) == ALL


def test_nothing_is_concluded_from_few_loads() -> None:
    """One less than it takes."""
    assert offered(serving(50 * NS_A_TOKEN, num_loads=MIN_LOADS - 1).ask()) == ALL


@pytest.mark.parametrize(("num_samples", "ns_a_token"), [(MIN_SAMPLES - 1, NS_A_TOKEN), (MIN_SAMPLES, 0)])
def test_nothing_is_concluded_where_the_cost_of_computing_is_not_known(num_samples: int, ns_a_token: int) -> None:
    """Too few steps, or steps whose time does not grow with their tokens."""
    server = Server()
    server.compute(num_samples, ns_a_token)
    for _ in range(2 * MIN_LOADS):
        assert offered(server.load(50 * NS_A_TOKEN)) == ALL


def test_nothing_is_concluded_where_other_work_of_the_machine_hides_what_computing_costs() -> None:
    """Small steps that were held up make a token look cheap; what is measured then scatters, and loads that cost less
    than computing are offered.
    """
    server = Server()
    server.compute(held_up_ns=(70_000_000, *[0] * (3 * NUM_STEPS - 1), 70_000_000))
    for _ in range(2 * MIN_LOADS):
        assert offered(server.load(0.6 * NS_A_TOKEN)) == ALL
    audit = server.audited()
    assert audit.violations == []
    assert not list(audit.divergences)


def test_time_in_which_nobody_computed_is_not_the_cost_of_computing() -> None:
    """The engine had nothing to do for an hour, between any two steps."""
    server = Server()
    server.compute()
    server.finish("busy", 0, NUM_PROMPT_TOKENS)
    for number in range(MIN_SAMPLES * NUM_STEPS):
        server.pass_ns(3_600_000_000_000)
        server.start(f"alone{number}", (), 4, (1,))
        server.finish(f"alone{number}", 0, 4)
    for _ in range(MIN_LOADS):
        server.load(50 * NS_A_TOKEN)
    assert offered(server.ask()) == NOTHING


def test_one_load_is_tried_again_later_and_the_others_wait_for_what_it_shows() -> None:
    """Nobody is offered one before; of two who ask then, the second comes when the first has taken it up."""
    server = serving(50 * NS_A_TOKEN)
    assert offered(server.ask()) == NOTHING
    server.pass_ns(PAUSE_NS)
    assert offered(server.ask()) == ALL
    (load,) = (event for event in server.allocate("r10", (10, 11, 12), NUM_TOKENS) if isinstance(event, e.LoadIssued))
    assert offered(server.ask()) == NOTHING
    server.report(load.job_id, duration_ns=load.num_tokens * NS_A_TOKEN // 2)
    assert offered(server.ask()) == ALL
    assert server.audited().violations == []


@pytest.mark.parametrize(("of_computing", "expected"), [(0.7, ALL), (0.9, NOTHING)])
def test_loads_are_taken_up_again_only_where_they_cost_clearly_less(
    of_computing: float, expected: tuple[int, str]
) -> None:
    """What would not have been given up is not enough to be taken up, so that nothing goes back and forth."""
    server = serving(50 * NS_A_TOKEN)
    server.pass_ns(PAUSE_NS)
    server.load(of_computing * NS_A_TOKEN)
    assert offered(server.ask()) == expected


@pytest.mark.parametrize("num_events_left", [3, 40, 70])
def test_an_audit_that_begins_in_the_middle_takes_over_what_was_measured(num_events_left: int) -> None:
    """It comes to the conclusion that a whole one comes to."""
    server = serving(50 * NS_A_TOKEN)
    assert offered(server.ask()) == NOTHING
    server.ledger.commit()
    events = list(server.sink.events())
    middle = next(n for n in range(len(events) - num_events_left, 0, -1) if not events[n][1].is_decision)
    start = server.folded(middle).start()
    assert server.audited(events[middle:], start=start).violations == []
