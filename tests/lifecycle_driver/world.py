"""A small world around one ledger: a scheduler with few blocks, its requests, its workers and their faults.

Its moves say to which request something happens; how it happens is drawn from `choices`. After every event the
invariants are checked, after every load the pages.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import attrs

from kvledger.lifecycle import Channel, Scheduled
from kvledger.lifecycle import events as e
from kvledger.lifecycle.states import BlocksRegion
from lifecycle_driver.choices import Choices, Seeded
from lifecycle_driver.device import Content, Device
from lifecycle_driver.driver import Driver
from lifecycle_driver.invariants import check_invariants
from lifecycle_driver.workers import Workers

MAX_PLAYERS = 5
SHARED_TOKENS = 21
BUDGET = 24


class CheckedDriver(Driver):
    """Checks the invariants after every observation and its decisions, if it `is_watched`."""

    def __init__(self, *, is_watched: bool, **configuration: Any) -> None:
        super().__init__(**configuration)
        self.is_watched = is_watched
        self.given_up: list[int] = []

    def observe(self, event: e.Event) -> list[e.Event]:
        """Record any event."""
        decisions = super().observe(event)
        if any(isinstance(decision, e.SaveFailed) for decision in decisions):
            self.given_up = self.given_up_slots()
        if self.is_watched:
            check_invariants(self.ledger.projections, self.given_up)
        return decisions


@attrs.define(eq=False)
class Player:
    """One request as the scheduler knows it."""

    request_id: str
    contents: list[Content] = attrs.field(repr=False)
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


def play_seed(seed: int, num_steps: int, *, chunk_size: int, block_size: int, **options: Any) -> Driver:
    """Let a seed make all choices of a world; returns the driver, which has the log."""
    world = World(Seeded(seed), chunk_size=chunk_size, block_size=block_size, **options)
    world.play(num_steps)
    return world.driver


class World:
    """A scheduler, its device and its workers; `driver` has the ledger and its log.

    A world that is not watched does not look for wrong pages and broken invariants. In a reliable one every copy is
    reported, and once.
    """

    def __init__(
        self,
        choices: Choices,
        *,
        chunk_size: int,
        block_size: int,
        is_watched: bool = True,
        is_reliable: bool = False,
        **options: Any,
    ) -> None:
        self.choices = choices
        self.driver = CheckedDriver(
            is_watched=is_watched,
            chunk_size=chunk_size,
            block_size=block_size,
            num_slots=choices.randint(max(1, chunk_size // block_size), 10),
            max_silent_steps=12,
            max_deferred_lookups=choices.choice((0, 3, 8)),
            num_ranks=choices.choice((1, 1, 2)),
            async_saves=choices.chance(0.5),
            async_load_tokens=choices.choice((None, 0, 20)),
            settles_in_flight=False,
            **options,
        )
        self.device = Device(block_size, choices.randint(6, 14))
        self.workers = Workers(choices, self.device, self.driver.configuration.num_ranks, reliable=is_reliable)
        self.asynchronous = choices.chance(0.5)
        self.players: list[Player] = []
        self.num_loads_checked = 0
        self._num_lives = 0
        self._seen = 0
        self._kept: dict[str, list[int]] = {}
        """Blocks of finished requests that vLLM keeps until it is told."""
        self._scheduled: list[tuple[Player, int]] = []
        self._victims: list[Player] = []
        self._extended: dict[str, list[int]] = {}

    @property
    def running(self) -> list[Player]:
        """Who has blocks, and computes."""
        return [player for player in self.players if player.running]

    def play(self, num_steps: int) -> None:
        """Make `num_steps` steps, requests arriving now and then; then `drain`."""
        for _ in range(num_steps):
            if self.choices.chance(0.4) and len(self.players) < MAX_PLAYERS:
                self.arrive()
            self.step()
            if self.choices.chance(0.02):
                self.driver.reset()
        self.drain()

    def drain(self) -> None:
        """Finish all requests, then make steps until nothing is owed."""
        for player in list(self.players):
            self.finish(player)
        for _ in range(40):
            self.step()
        self.driver.ledger.commit()

    # --- requests --------------------------------------------------------------------------------

    def arrive(self) -> None:
        """Add a request; all begin with the same tokens."""
        known = {player.request_id for player in self.players} | set(self._kept)
        request_id = self.choices.choice([name for name in "abcdefghijklmnopqrstuvwxyz" if name not in known])
        self._num_lives += 1
        player = Player(request_id, [], self.choices.randint(30, 80), self._num_lives)
        num_prompt_tokens = self.choices.randint(3, 50)
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

    def preempt(self, player: Player) -> None:
        """Take the blocks of a running request."""
        self.driver.preempt(player.request_id, player.settled, len(player.contents), player.in_flight)
        self._let_go(player)
        player.computed = player.in_flight = 0
        self._scheduled = [entry for entry in self._scheduled if entry[0] is not player]
        self._victims.append(player)

    def finish(self, player: Player, status: str = "FINISHED_ABORTED") -> None:
        """End a request."""
        counted = self.driver.projections.tracker.num_computed_tokens(self.driver.record(player.request_id))
        settled = 0 if player.loading else min(player.settled, counted)  # what no step computed upon is a promise
        decisions = self.driver.observe(
            e.RequestFinished(
                player.request_id,
                status,
                settled,
                len(player.contents),
                self.workers.step,
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

    def continue_session(self, player: Player) -> None:
        """Begin the next turn of a running request."""
        # The next turn may rewrite what is in the last, part-filled block, never a full one that others may share.
        cut = self.choices.randint(player.computed // self.device.block_size * self.device.block_size, player.computed)
        player.turn += 1
        player.computed, player.in_flight = cut, 0
        del player.contents[cut:]
        player.extend(self.choices.randint(1, 20))
        player.target = len(player.contents) + self.choices.randint(1, 20)
        player.num_keys = min(player.num_keys, cut // self.driver.configuration.chunk_size)
        self.driver.continue_session(player.request_id, cut, len(player.contents))
        self._tell_keys(player)

    # --- one engine step -------------------------------------------------------------------------

    def step(self) -> None:
        """Schedule, make the copies and the forward, and take the output."""
        self.workers.step += 1
        self._scheduled, self._victims, self._extended = [], [], {}
        self._schedule_running()
        for player in [player for player in self.running if self.choices.chance(0.04)]:
            self.preempt(player)
        waiting = [player for player in self.players if not player.running and player not in self._victims]
        for player in [player for player in waiting if not player.loading]:
            if self.choices.chance(0.7):
                self._admit(player)
        for player in [player for player in waiting if player.loading and self.choices.chance(0.02)]:
            self.finish(player)
        self._tell_step()
        told = self.driver.deliver(Channel.WORKERS)
        failed = self._execute()
        self._process_outputs(failed)
        self.driver.deliver(Channel.VLLM, reported=[*told.failed.values(), *told.sent.values()])

    def _schedule_running(self) -> None:
        for player in self.running:
            if not player.running:
                continue  # preempted for another one in this very step
            if self.choices.chance(0.1):
                continue
            num_tokens = min(len(player.contents) - player.computed, self.choices.randint(1, BUDGET))
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
            victim = self.running[-1]
            self.preempt(victim)
            if victim is player:
                return False
        return True

    def _admit(self, player: Player) -> None:
        if player.blocks:
            self._start_after_load(player)
            return
        local = self.device.local_hit(player.contents)
        num_local = len(local) * self.device.block_size
        for _ in range(self.choices.randint(1, 3)):
            answer = self.driver.poll(player.request_id, num_local, len(player.contents))
        if not isinstance(answer, e.LookupAnswered):
            return  # it is worth waiting for its own save
        external = answer.num_external_tokens
        assert num_local + external < max(len(player.contents), 1), "the last token was promised too"
        if external and self.choices.chance(0.2):
            external = self.choices.choice((0, self.choices.randint(1, external)))
        computed = num_local + external
        waits = answer.is_async and external > 0
        num_tokens = 0 if waits else min(len(player.contents) - computed, self.choices.randint(1, BUDGET))
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
        num_tokens = min(len(player.contents) - player.computed, self.choices.randint(1, BUDGET))
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
        self.workers.finish_awaited([event.job_id for event in new if isinstance(event, e.TransferAwaited)])
        for save in before:
            self.workers.copy_out(save)
        failed = {load.request_id for load in loads if self.choices.chance(0.15)}
        players = {player.request_id: player for player in self.players}
        for load in loads:
            if load.request_id not in failed:
                self.device.load(load.slots, load.block_ids)
                self._check_loaded(players[load.request_id])
        self._forward(failed)
        for save in saves:
            if save not in before and not getattr(save, "is_async", False):
                self.workers.copy_out(save)
        for load in loads:
            delay = 0 if load.request_id in failed else self.choices.randint(0, 2)
            self.workers.report_later(load.job_id, good=load.request_id not in failed, max_delay=delay)
        self.workers.begin_copies(new)
        return failed

    def _forward(self, failed: set[str]) -> None:
        for player, num_tokens in self._scheduled:
            intact = self._has_right_pages(player)
            assert intact or player.request_id in failed, f"{player} computes on top of wrong pages"
            for position in range(player.computed, player.computed + num_tokens):
                content = player.contents[position] if intact else ("garbage", self.workers.step, position)
                self.device.write(position, content, player.blocks)

    def _check_loaded(self, player: Player) -> None:
        assert self._has_right_pages(player), (
            f"poisoned: a load brought pages that are not the first {player.computed} tokens of {player.request_id}"
        )
        self.num_loads_checked += 1

    def _has_right_pages(self, player: Player) -> bool:
        is_watched = self.driver.is_watched
        return not is_watched or self.device.holds(player.contents[: player.computed], player.blocks)

    def _take_up(self, decisions: Iterable[e.Event]) -> None:
        """What vLLM does when it is told that a load or the copies of a finished request are done."""
        players = {player.request_id: player for player in self.players}
        for decision in decisions:
            if isinstance(decision, e.RequestReleased):
                self.device.give_back(self._kept.pop(decision.request_id, ()))
            elif isinstance(decision, e.LoadCompleted | e.LoadFailed):
                self.workers.give_up(decision.job_id)
                player = players.get(decision.request_id)
                if player is None or not player.loading:
                    continue
                player.loading = False
                if isinstance(decision, e.LoadCompleted):
                    self._check_loaded(player)
                else:
                    player.computed = 0
                    self._let_go(player)

    def _process_outputs(self, failed: Iterable[str]) -> None:
        jobs = {job.job_id for job in self.driver.projections.jobs}
        for report in self.workers.due():
            self._take_up(
                self.driver.report(report.job_id, ok=report.good, ranks=report.ranks, is_repeated=report.is_repeated)
            )
        for player, num_tokens in self._scheduled:
            player.computed += num_tokens
            player.in_flight = num_tokens if self.asynchronous else 0
            if player.request_id in failed:
                self._roll_back(player, jobs)
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
            elif self.choices.chance(0.01):
                self.finish(player)

    def _end_turn(self, player: Player) -> None:
        record = self.driver.record(player.request_id)
        if self.choices.chance(0.3) and record.blocks is not BlocksRegion.LOADING:
            self.continue_session(player)
        else:
            self.finish(player, "FINISHED_STOPPED")

    def _roll_back(self, player: Player, jobs: set[int]) -> None:
        loads = [event for event in self.driver.all_of(e.LoadIssued) if event.request_id == player.request_id]
        player.computed, player.in_flight = loads[-1].first_token, 0
        assert loads[-1].job_id in jobs
        self.driver.roll_back(player.request_id, player.computed)
