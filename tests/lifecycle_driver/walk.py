"""A random walk: a small scheduler with few blocks that plays requests, workers and faults against a ledger.

Everything is drawn from one seed. After every event the invariants are checked, after every load the pages.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from random import Random
from typing import Any

import attrs

from kvledger.lifecycle import Channel, Scheduled
from kvledger.lifecycle import events as e
from kvledger.lifecycle.states import BlocksRegion
from lifecycle_driver.device import Content, Device
from lifecycle_driver.driver import Driver
from lifecycle_driver.invariants import check_invariants

SHARED_TOKENS = 21
BUDGET = 24


class CheckedDriver(Driver):
    """Checks the invariants after every observation and its decisions."""

    def __init__(self, **configuration: Any) -> None:
        super().__init__(**configuration)
        self.given_up: list[int] = []

    def observe(self, event: e.Event) -> list[e.Event]:
        """Record any event."""
        decisions = super().observe(event)
        if any(isinstance(decision, e.SaveFailed) for decision in decisions):
            self.given_up = self.given_up_slots()
        check_invariants(self.ledger.projections, self.given_up)
        return decisions


@attrs.define(eq=False)
class Player:
    """One request as the scheduler knows it."""

    request_id: str
    contents: list[Content]
    """What each known token is; grows by one per sampled token."""
    target: int
    life: int
    computed: int = 0
    in_flight: int = 0
    blocks: list[int] = attrs.field(factory=list)
    running: bool = False
    loading: bool = False
    """An asynchronous load fills its blocks; it is in no step until that is settled."""
    num_keys: int = 0
    turn: int = 0

    def extend(self, num_tokens: int) -> None:
        """Append tokens that nobody else has."""
        for _ in range(num_tokens):
            self.contents.append((self.request_id, self.life, self.turn, len(self.contents)))

    @property
    def settled(self) -> int:
        """Tokens whose step has been processed."""
        return self.computed - self.in_flight


@attrs.frozen
class _Report:
    """What ranks will tell about a job, and when."""

    due_step: int
    job_id: int
    ranks: tuple[int, ...]
    good: bool
    is_repeated: bool = False


@attrs.define
class _Copy:
    """An asynchronous job on its way; its bytes move as late as possible, at the end of `due_step`."""

    event: e.LoadIssued | e.SaveIssued
    due_step: int


class Walk:
    """One seed's walk; `run` plays it, `driver` has the ledger and its log."""

    def __init__(self, seed: int, *, chunk_size: int, block_size: int, **options: Any) -> None:
        self.random = Random(seed)
        self.driver = CheckedDriver(
            chunk_size=chunk_size,
            block_size=block_size,
            num_slots=self.random.randint(max(1, chunk_size // block_size), 10),
            max_silent_steps=12,
            max_deferred_lookups=self.random.choice((0, 3, 8)),
            num_ranks=self.random.choice((1, 1, 2)),
            async_saves=self.random.random() < 0.5,
            async_load_tokens=self.random.choice((None, 0, 20)),
            settles_in_flight=False,
            **options,
        )
        self.device = Device(block_size, self.random.randint(6, 14))
        self.asynchronous = self.random.random() < 0.5
        self.players: list[Player] = []
        self._num_lives = 0
        self._seen = 0
        self._reports: list[_Report] = []
        self._copies: list[_Copy] = []
        self._outcomes: dict[int, bool] = {}
        self._kept: dict[str, list[int]] = {}
        """Blocks of finished requests that vLLM keeps until it is told."""
        self._step = 0
        self._scheduled: list[tuple[Player, int]] = []
        self._victims: list[Player] = []
        self._extended: dict[str, list[int]] = {}
        self.num_loads_checked = 0

    def run(self, num_steps: int) -> None:
        """Play, then let everybody leave and settle what is owed."""
        for _ in range(num_steps):
            if self.random.random() < 0.4 and len(self.players) < 5:
                self._arrive()
            self._play_step()
            if self.random.random() < 0.02:
                self.driver.reset()
        for player in list(self.players):
            self._finish(player, "FINISHED_ABORTED")
        for _ in range(40):
            self._play_step()
        self.driver.ledger.commit()

    def _chance(self, probability: float) -> bool:
        return self.random.random() < probability

    # --- requests --------------------------------------------------------------------------------

    def _arrive(self) -> None:
        known = {player.request_id for player in self.players} | set(self._kept)
        request_id = self.random.choice([name for name in "abcdefghijklmnopqrstuvwxyz" if name not in known])
        self._num_lives += 1
        player = Player(request_id, [], self.random.randint(30, 80), self._num_lives)
        num_prompt_tokens = self.random.randint(3, 50)
        player.contents = [("shared", position) for position in range(min(SHARED_TOKENS, num_prompt_tokens))]
        player.extend(num_prompt_tokens - len(player.contents))
        self.players.append(player)
        self.driver.arrive(request_id, num_prompt_tokens)
        self._tell_keys(player)

    def _tell_keys(self, player: Player) -> None:
        size = self.driver.configuration.chunk_size
        keys = [
            hashlib.blake2b(repr(player.contents[(chunk + 1) * size - 1]).encode(), digest_size=16).digest()
            for chunk in range(player.num_keys, len(player.contents) // size)
        ]
        if keys:
            self.driver.keys(player.request_id, player.num_keys, keys)
            player.num_keys += len(keys)

    def _preempt(self, player: Player) -> None:
        self.driver.preempt(player.request_id, player.settled, len(player.contents), player.in_flight)
        self._let_go(player)
        player.computed = player.in_flight = 0
        self._scheduled = [entry for entry in self._scheduled if entry[0] is not player]
        self._victims.append(player)

    def _finish(self, player: Player, status: str) -> None:
        counted = self.driver.projections.tracker.num_computed_tokens(self.driver.record(player.request_id))
        settled = 0 if player.loading else min(player.settled, counted)  # what no step computed upon is a promise
        decisions = self.driver.observe(
            e.RequestFinished(
                player.request_id,
                status,
                settled,
                len(player.contents),
                self._step,
                num_in_flight_tokens=player.in_flight,
                num_computed_tokens=0 if player.loading else player.computed,
            )
        )
        self.players.remove(player)
        if player.loading or any(isinstance(decision, e.BlocksHeld) for decision in decisions):
            self._kept[player.request_id] = player.blocks
            player.blocks = []
        self._let_go(player)
        self._take_up(decisions)

    def _let_go(self, player: Player) -> None:
        self.device.give_back(player.blocks)
        player.blocks, player.running = [], False

    def _continue(self, player: Player) -> None:
        # The next turn may rewrite what is in the last, part-filled block, never a full one that others may share.
        cut = self.random.randint(player.computed // self.device.block_size * self.device.block_size, player.computed)
        player.turn += 1
        player.computed, player.in_flight = cut, 0
        del player.contents[cut:]
        player.extend(self.random.randint(1, 20))
        player.target = len(player.contents) + self.random.randint(1, 20)
        player.num_keys = min(player.num_keys, cut // self.driver.configuration.chunk_size)
        self.driver.continue_session(player.request_id, cut, len(player.contents))
        self._tell_keys(player)

    # --- one engine step -------------------------------------------------------------------------

    def _play_step(self) -> None:
        self._step += 1
        self._scheduled, self._victims, self._extended = [], [], {}
        self._schedule_running()
        for player in [player for player in self.players if player.running and self._chance(0.04)]:
            self._preempt(player)
        waiting = [player for player in self.players if not player.running and player not in self._victims]
        for player in [player for player in waiting if not player.loading]:
            if self._chance(0.7):
                self._admit(player)
        for player in [player for player in waiting if player.loading and self._chance(0.02)]:
            self._finish(player, "FINISHED_ABORTED")
        self._tell_step()
        told = self.driver.deliver(Channel.WORKERS)
        failed = self._execute()
        self._process_outputs(failed)
        self.driver.deliver(Channel.VLLM, reported=[*told.failed.values(), *told.sent.values()])

    def _schedule_running(self) -> None:
        for player in [player for player in self.players if player.running]:
            if not player.running:
                continue  # preempted for another one in this very step
            if self._chance(0.1):
                continue
            num_tokens = min(len(player.contents) - player.computed, self.random.randint(1, BUDGET))
            missing = -(-(player.computed + num_tokens) // self.device.block_size) - len(player.blocks)
            if self._make_room(player, missing):
                if missing > 0:
                    taken = self.device.take(missing)
                    player.blocks += taken
                    self._extended[player.request_id] = taken
                self._scheduled.append((player, num_tokens))

    def _tell_step(self) -> None:
        self._take_up(
            self.driver.schedule(
                *(
                    Scheduled(
                        player.request_id,
                        player.computed,
                        num_tokens,
                        len(player.contents),
                        tuple(self._extended.get(player.request_id, ())),
                        player.in_flight,
                    )
                    for player, num_tokens in self._scheduled
                )
            )
        )

    def _make_room(self, player: Player, missing: int) -> bool:
        while len(self.device.free) < missing:
            victim = [other for other in self.players if other.running][-1]
            self._preempt(victim)
            if victim is player:
                return False
        return True

    def _admit(self, player: Player) -> None:
        if player.blocks:
            self._start_after_load(player)
            return
        local = self.device.local_hit(player.contents)
        num_local = len(local) * self.device.block_size
        for _ in range(self.random.randint(1, 3)):
            answer = self.driver.poll(player.request_id, num_local, len(player.contents))
        if not isinstance(answer, e.LookupAnswered):
            return  # it is worth waiting for its own save
        external = answer.num_external_tokens
        assert num_local + external < max(len(player.contents), 1), "the last token was promised too"
        if external and self._chance(0.2):
            external = self.random.choice((0, self.random.randint(1, external)))
        computed = num_local + external
        waits = answer.is_async and external > 0
        num_tokens = 0 if waits else min(len(player.contents) - computed, self.random.randint(1, BUDGET))
        missing = -(-(computed + num_tokens) // self.device.block_size) - len(local)
        if self.device.num_free_besides(local) < missing:
            return  # polled in vain; it will be polled again
        self.device.share(local)
        player.blocks = local + self.device.take(missing)
        player.computed, player.in_flight = computed, 0
        self.driver.allocate(player.request_id, player.blocks, external)
        if waits:
            player.loading = True
        else:
            player.running = True
            self._scheduled.append((player, num_tokens))

    def _start_after_load(self, player: Player) -> None:
        """The second phase of an asynchronous load: no lookup, the whole table again, nothing taken up."""
        num_tokens = min(len(player.contents) - player.computed, self.random.randint(1, BUDGET))
        missing = -(-(player.computed + num_tokens) // self.device.block_size) - len(player.blocks)
        if len(self.device.free) >= missing:
            player.blocks += self.device.take(missing)
            player.running = True
            self.driver.allocate(player.request_id, player.blocks, 0)
            self._scheduled.append((player, num_tokens))

    def _execute(self) -> set[str]:
        """Workers: what must precede the forward, loads, the forward, other saves. Returns who lost a load."""
        new = self.driver.observed[self._seen :]
        self._seen = len(self.driver.observed)
        saves = [event for event in new if isinstance(event, e.SaveIssued | e.TailSaveIssued)]
        before = [save for save in saves if isinstance(save, e.TailSaveIssued) or save.before_forward]
        loads = [event for event in new if isinstance(event, e.LoadIssued) and not event.is_async]
        self._finish_awaited([event.job_id for event in new if isinstance(event, e.TransferAwaited)])
        for save in before:
            self._copy_out(save)
        failed = {load.request_id for load in loads if self._chance(0.15)}
        players = {player.request_id: player for player in self.players}
        for load in loads:
            if load.request_id not in failed:
                self.device.load(load.slots, load.block_ids)
                self._check_loaded(players[load.request_id])
        self._forward(failed)
        for save in saves:
            if save not in before and not getattr(save, "is_async", False):
                self._copy_out(save)
        for load in loads:
            delay = 0 if load.request_id in failed else self.random.randint(0, 2)
            self._report_later(load.job_id, good=load.request_id not in failed, max_delay=delay)
        self._copy_beside(new)
        return failed

    def _finish_awaited(self, job_ids: list[int]) -> None:
        for copy in [copy for copy in self._copies if copy.event.job_id in job_ids]:
            self._carry_out(copy)
        for job_id in job_ids:
            if job_id in self._outcomes and self._chance(0.7):
                self._report_later(job_id, good=self._outcomes[job_id], is_repeated=True)

    def _forward(self, failed: set[str]) -> None:
        for player, num_tokens in self._scheduled:
            intact = self.device.holds(player.contents[: player.computed], player.blocks)
            assert intact or player.request_id in failed, f"{player} computes on top of wrong pages"
            for position in range(player.computed, player.computed + num_tokens):
                content = player.contents[position] if intact else ("garbage", self._step, position)
                self.device.write(position, content, player.blocks)

    def _copy_beside(self, new: Iterable[e.Event]) -> None:
        self._copies += [
            _Copy(event, self._step + self.random.randint(0, 4))
            for event in new
            if isinstance(event, e.LoadIssued | e.SaveIssued) and event.is_async
        ]
        for copy in [copy for copy in self._copies if copy.due_step <= self._step]:
            self._carry_out(copy)

    def _carry_out(self, copy: _Copy) -> None:
        self._copies.remove(copy)
        if isinstance(copy.event, e.SaveIssued):
            self._copy_out(copy.event)
            return
        good = not self._chance(0.15)
        if good:
            self.device.load(copy.event.slots, copy.event.block_ids)
        self._outcomes[copy.event.job_id] = good
        if not self._chance(0.03):
            self._report_later(copy.event.job_id, good=good)

    def _check_loaded(self, player: Player) -> None:
        assert self.device.holds(player.contents[: player.computed], player.blocks), (
            f"poisoned: a load brought pages that are not the first {player.computed} tokens of {player.request_id}"
        )
        self.num_loads_checked += 1

    def _report_later(self, job_id: int, *, good: bool, max_delay: int = 4, is_repeated: bool = False) -> None:
        ranks = tuple(range(self.driver.configuration.num_ranks))
        parts = [(rank,) for rank in ranks] if self._chance(0.3) else [ranks]
        for part in parts:
            due_step = self._step + self.random.randint(0, max_delay)
            self._reports.append(_Report(due_step, job_id, part, good, is_repeated))

    def _take_up(self, decisions: Iterable[e.Event]) -> None:
        """What vLLM does when it is told that a load or the copies of a finished request are done."""
        players = {player.request_id: player for player in self.players}
        for decision in decisions:
            if isinstance(decision, e.RequestReleased):
                self.device.give_back(self._kept.pop(decision.request_id, ()))
            elif isinstance(decision, e.LoadCompleted | e.LoadFailed):
                # The worker of a load that was given up reports no more.
                self._copies = [copy for copy in self._copies if copy.event.job_id != decision.job_id]
                player = players.get(decision.request_id)
                if player is None or not player.loading:
                    continue
                player.loading = False
                if isinstance(decision, e.LoadCompleted):
                    self._check_loaded(player)
                else:
                    player.computed = 0
                    self._let_go(player)

    def _copy_out(self, save: e.SaveIssued | e.TailSaveIssued) -> None:
        self.device.save(save.block_ids, save.slots)
        good = self._outcomes[save.job_id] = not self._chance(0.1)
        if not good:
            self.device.slots[save.slots[-1]] = [("torn",)] * self.device.block_size
        if self._chance(0.03):
            return  # a report that is lost
        self._report_later(save.job_id, good=good)
        if self._chance(0.03):
            self._report_later(save.job_id, good=good)

    def _process_outputs(self, failed: Iterable[str]) -> None:
        due = [report for report in self._reports if report.due_step <= self._step]
        self._reports = [report for report in self._reports if report.due_step > self._step]
        first_tokens = {job.job_id: job for job in self.driver.projections.jobs}
        for report in due:
            decisions = self.driver.report(
                report.job_id, ok=report.good, ranks=report.ranks, is_repeated=report.is_repeated
            )
            self._take_up(decisions)
        for player, num_tokens in self._scheduled:
            player.computed += num_tokens
            player.in_flight = num_tokens if self.asynchronous else 0
            if player.request_id in failed:
                self._roll_back(player, first_tokens)
                continue
            record = self.driver.record(player.request_id)
            counted = self.driver.projections.tracker.num_computed_tokens(record)
            assert counted == player.computed, f"{player.request_id}: {counted} counted, {player.computed} computed"
            assert list(record.block_ids or ()) == player.blocks
            self.device.remember(player.contents[: player.computed], player.blocks)
            if player.computed == len(player.contents):
                player.extend(1)
                self._tell_keys(player)
            if len(player.contents) >= player.target:
                self._end_turn(player)
            elif self._chance(0.01):
                self._finish(player, "FINISHED_ABORTED")

    def _end_turn(self, player: Player) -> None:
        record = self.driver.record(player.request_id)
        if self._chance(0.3) and record.blocks is not BlocksRegion.LOADING:
            self._continue(player)
        else:
            self._finish(player, "FINISHED_STOPPED")

    def _roll_back(self, player: Player, jobs: dict[int, object]) -> None:
        loads = [event for event in self.driver.all_of(e.LoadIssued) if event.request_id == player.request_id]
        player.computed, player.in_flight = loads[-1].first_token, 0
        assert loads[-1].job_id in jobs
        self.driver.roll_back(player.request_id, player.computed)
