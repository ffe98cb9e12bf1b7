"""What happens to requests, in short commands that tests read and people write.

    ledger block=16 chunk=16 slots=8      begins a ledger; more keys of `LedgerConfiguration`, handlers=module:Class
    arrive a 40 keys=2                    `a` arrives with 40 prompt tokens; of=x takes the keys of another document
    keys a 1 first=2                      one more key becomes known, that of chunk 2
    lookup a 0/40                         0 of 40 known tokens are computed; how much can be loaded?
    allocate a 1-3 load=32                it gets blocks 1 to 3; 32 tokens of the answer are taken up
    blocks a 1-3                          that it holds them is seen without an allocation: a hook has failed
    step a:0+40/40 b:20+1/21@7~1          40 tokens behind the first 0 of 40; for `b` block 7 is new, 1 token in flight
    preempt a 40                          its blocks are taken; 40 tokens had settled. 40/41: of 41 known
    report 1 2 error=text                 all ranks report jobs 1 and 2; with an error, as failed
    deliver workers                       with the step they are given what they are owed
    deliver vllm reported=a               it is told what it is owed; of `a` it has the workers' report
    fail build_connector_meta             a hook fails; with a request id, in its name
    refuse a 1-2                          its load will not be, these blocks were to be filled
    unfilled 1-3                          these blocks could not be filled
    rollback a 16                         it counts 16 computed tokens again
    continue a 40/60                      a session's next turn
    finish a 40/41 FINISHED_ABORTED       it ends: 40 tokens settled of 41 known
    reset                                 everything cached is stale

It must not know what is made of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvledger.lifecycle import Channel, Scheduled
from kvledger.lifecycle import events as e
from lifecycle_driver.driver import Driver, keys_of


class Commands:
    """Carries them out on a driver."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.names: dict[bytes, str] = {}
        """Key → the chunk that it is of: `prompt/0`."""

    def carry_out(self, name: str, words: Sequence[str]) -> None:
        """Do what one line says; `words` are what follows its name."""
        command: Callable[..., None] = getattr(self, f"_{name}")
        command(*(word for word in words if "=" not in word), **given_in(words))

    def _arrive(self, request_id: str, num_prompt_tokens: str, keys: str = "0", of: str = "") -> None:
        self.driver.arrive(request_id, int(num_prompt_tokens))
        if int(keys):
            self._keys(request_id, keys, of=of)

    def _keys(self, request_id: str, num_keys: str, first: str = "0", of: str = "") -> None:
        known = keys_of(of or request_id, int(num_keys), int(first))
        self.names.update({key: f"{of or request_id}/{chunk}" for chunk, key in enumerate(known, int(first))})
        self.driver.keys(request_id, int(first), known)

    def _lookup(self, request_id: str, counts: str) -> None:
        self.driver.observe(e.LookupRequested(request_id, *_counts(counts), self.driver._now()))

    def _allocate(self, request_id: str, blocks: str, load: str = "0") -> None:
        self.driver.allocate(request_id, _numbers(blocks), int(load))

    def _blocks(self, request_id: str, blocks: str) -> None:
        self.driver.observe(e.BlockTableObserved(request_id, _numbers(blocks), self.driver._now()))

    def _step(self, *requests: str) -> None:
        self.driver.schedule(*map(_scheduled, requests))

    def _preempt(self, request_id: str, counts: str) -> None:
        num_settled_tokens, _, num_tokens = counts.partition("/")
        self.driver.preempt(request_id, int(num_settled_tokens), int(num_tokens) if num_tokens else None)

    def _report(self, *job_ids: str, error: str = "") -> None:
        for job_id in job_ids:
            self.driver.report(int(job_id), ok=not error, error=error, num_ranks=self.driver.configuration.num_ranks)

    def _deliver(self, channel: str, reported: str = "") -> None:
        self.driver.deliver(Channel(channel), reported=filter(None, [reported]))

    def _fail(self, hook: str, request_id: str = "") -> None:
        self.driver.observe(e.HookFailed(hook, request_id, "broken", self.driver._now()))

    def _refuse(self, request_id: str, blocks: str) -> None:
        self.driver.observe(e.LoadRefused(request_id, _numbers(blocks), self.driver._now()))

    def _unfilled(self, blocks: str) -> None:
        self.driver.observe(e.LoadErrorsObserved(_numbers(blocks), self.driver._now()))

    def _rollback(self, request_id: str, num_computed_tokens: str) -> None:
        self.driver.roll_back(request_id, int(num_computed_tokens))

    def _continue(self, request_id: str, counts: str) -> None:
        self.driver.continue_session(request_id, *_counts(counts))

    def _finish(self, request_id: str, counts: str, status: str = "FINISHED_STOPPED") -> None:
        self.driver.observe(e.RequestFinished(request_id, status, *_counts(counts), self.driver._now()))

    def _reset(self) -> None:
        self.driver.reset()


def given_in(words: Sequence[str]) -> dict[str, str]:
    """Those of the words that are `name=value`."""
    return dict(word.split("=", 1) for word in words if "=" in word)


def _counts(text: str) -> tuple[int, int]:
    first, second = map(int, text.split("/"))
    return first, second


def _numbers(text: str) -> tuple[int, ...]:
    parts = (part.partition("-") for part in text.split(",") if part)
    return tuple(number for first, _, last in parts for number in range(int(first), int(last or first) + 1))


def _scheduled(text: str) -> Scheduled:
    text, _, in_flight = text.partition("~")
    text, _, blocks = text.partition("@")
    request_id, counts = text.split(":")
    computed, _, rest = counts.partition("+")
    num_scheduled_tokens, num_tokens = _counts(rest)
    return Scheduled(request_id, int(computed), num_scheduled_tokens, num_tokens, _numbers(blocks), int(in_flight or 0))
