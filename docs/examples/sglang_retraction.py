"""Drives the core as another engine would: a model of SGLang's retract and resume over a radix cache.

    python docs/examples/sglang_retraction.py LOG_DIR

The names are those of SGLang's public source: `Req`, `init_next_round_input`, `prepare_for_extend`, `check_decode_mem`,
`retract_decode`, `reset_for_retract` (python/sglang/srt/managers/schedule_batch.py), `get_next_batch_to_run`,
`update_running_batch` (managers/scheduler.py), `match_prefix`, `cache_finished_req` (mem_cache/radix_cache.py). A page
has one token, a batch either extends or decodes, and a retracted request goes back to the waiting queue. No code of
SGLang is used. Device and host hold what each token's KV depends on, so that a wrong copy is detected.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from pathlib import Path

import attrs

from kvledger.lifecycle import Channel, Core, Ledger, LedgerConfiguration, Scheduled, StepEncoder, log_header
from kvledger.lifecycle import events as e
from kvledger.storage.events import SegmentEventStore

CHUNK, POOL, HOST = 4, 32, 64
Tokens = tuple[int, ...]


@attrs.define(eq=False)
class Req:
    """A request: its tokens, and the page with the KV of each token."""

    rid: str
    origin_input_ids: Tokens
    max_new_tokens: int
    output_ids: Tokens = ()
    kv_indices: list[int] = attrs.field(factory=list)
    is_retracted: bool = False
    num_keys: int = 0

    @property
    def fill_ids(self) -> Tokens:
        """All tokens of the request: its prompt and its outputs."""
        return self.origin_input_ids + self.output_ids


class RadixCache:
    """The prefixes on the device, here as a dictionary: prefix → page of its last token."""

    def __init__(self) -> None:
        self.nodes: dict[Tokens, int] = {}

    def match_prefix(self, tokens: Tokens) -> list[int]:
        """Return the pages of the longest prefix, without the last token, which is always computed."""
        found = []
        for end in range(1, len(tokens)):
            if tokens[:end] not in self.nodes:
                break
            found.append(self.nodes[tokens[:end]])
        return found

    def evict(self, in_use: set[int]) -> list[int]:
        """Evict the prefixes whose page is not in use, and return their pages."""
        unused = [tokens for tokens, index in self.nodes.items() if index not in in_use]
        return [self.nodes.pop(tokens) for tokens in unused]


class Scheduler:
    """A loop over a waiting queue and a running batch. An adapter would add the lines with `observe`."""

    def __init__(self, log_dir: Path) -> None:
        configuration = LedgerConfiguration(block_size=1, chunk_size=CHUNK, num_slots=HOST)
        core = Core.standard()
        self.store = SegmentEventStore.create(log_dir, log_header(core, configuration))
        self.ledger = Ledger(core, configuration, self.store, checks_input=True)
        self.steps = StepEncoder(self.ledger.projections)
        self.tree_cache, self.free = RadixCache(), list(range(1, POOL + 1))
        self.device: dict[int, Tokens] = {}
        self.host: dict[int, Tokens] = {}
        self.waiting_queue: list[Req] = []
        self.running_batch: list[Req] = []
        self.num_retracted = self.num_loaded = self.time_ns = 0

    def now(self) -> int:
        """Return the time of the model's own clock, in nanoseconds."""
        self.time_ns += 1_000_000
        return self.time_ns

    def observe(self, event: e.Event) -> list[e.Event]:
        """Record an event, and return the decisions. Their copies wait until the batch runs."""
        decisions = self.ledger.observe(event)
        self.ledger.commit()
        return decisions

    def add(self, req: Req) -> None:
        """Add a request to the waiting queue."""
        self.observe(e.RequestArrived(req.rid, self.ledger.next_ordinal, len(req.origin_input_ids), self.now()))
        self.waiting_queue.append(req)
        self.observe_keys(req)

    def observe_keys(self, req: Req) -> None:
        """Record the keys of the chunks that are full by now."""
        ends = range((req.num_keys + 1) * CHUNK, len(req.fill_ids) + 1, CHUNK)
        keys = tuple(hashlib.blake2b(repr(req.fill_ids[:end]).encode(), digest_size=16).digest() for end in ends)
        if keys:
            self.observe(e.ChunkKeysObserved(req.rid, req.num_keys, keys))
            req.num_keys += len(keys)

    def allocate(self, num_tokens: int) -> list[int] | None:
        """Return free pages, after an eviction if necessary; None if there are not enough."""
        if len(self.free) < num_tokens:
            self.free += self.tree_cache.evict({index for req in self.running_batch for index in req.kv_indices})
        if len(self.free) < num_tokens:
            return None
        taken, self.free = self.free[:num_tokens], self.free[num_tokens:]
        return taken

    def get_next_batch_to_run(self) -> list[Scheduled]:
        """Extend the waiting requests that fit; decode if there are none."""
        return self.get_new_batch_prefill() or self.update_running_batch()

    def get_new_batch_prefill(self) -> list[Scheduled]:
        """Match each prefix on the device, then on the host; call `prepare_for_extend` if there is room."""
        batch = []
        for req in list(self.waiting_queue):
            prefix_indices = self.tree_cache.match_prefix(req.fill_ids)
            lookup = e.LookupRequested(req.rid, len(prefix_indices), len(req.fill_ids), self.now())
            (answer,) = self.observe(lookup)
            if not isinstance(answer, e.LookupAnswered):
                continue  # deferred: a save of its lost pages is in flight
            req.kv_indices = prefix_indices
            self.running_batch.append(req)  # from here on its prefix is in use
            out_cache_loc = self.allocate(len(req.fill_ids) - len(prefix_indices) + 1)
            if out_cache_loc is None:
                self.running_batch.remove(req)
                req.kv_indices = []
                break
            self.free.append(out_cache_loc.pop())  # a spare page for its first output
            self.waiting_queue.remove(req)
            req.kv_indices, req.is_retracted = prefix_indices + out_cache_loc, False
            loaded = answer.num_external_tokens
            self.observe(e.BlocksAllocated(req.rid, tuple(req.kv_indices), loaded, self.now()))
            self.num_loaded += loaded
            computed = len(prefix_indices) + loaded
            batch.append(Scheduled(req.rid, computed, len(req.fill_ids) - computed, len(req.fill_ids)))
        return batch

    def update_running_batch(self) -> list[Scheduled]:
        """Decode one token of each request; call `retract_decode` while there is no room for that."""
        while (out_cache_loc := self.allocate(len(self.running_batch))) is None:
            self.retract_decode()
        batch = []
        for req, index in zip(self.running_batch, out_cache_loc, strict=True):
            req.kv_indices.append(index)
            num_tokens = len(req.fill_ids)
            batch.append(Scheduled(req.rid, num_tokens - 1, 1, num_tokens, new_block_ids=(index,)))
        return batch

    def retract_decode(self) -> None:
        """Return the request with the fewest outputs to the queue, and free its pages."""
        req = min(self.running_batch, key=lambda req: (len(req.output_ids), -len(req.origin_input_ids)))
        self.observe(e.RequestPreempted(req.rid, len(req.fill_ids) - 1, len(req.fill_ids), self.now()))
        self.release(req)
        req.is_retracted = True
        self.waiting_queue.append(req)
        self.num_retracted += 1

    def release(self, req: Req) -> None:
        """Free the pages of a request, except those in the radix cache."""
        self.free += sorted(set(req.kv_indices) - set(self.tree_cache.nodes.values()))
        req.kv_indices = []
        self.running_batch.remove(req)

    def run_batch(self) -> None:
        """Run the copies before the forward, the forward, and the other copies; report them, and add the tokens."""
        batch = self.get_next_batch_to_run()
        self.observe(self.steps.encode(batch, self.now()))
        self.ledger.advance(pending := self.ledger.ready(Channel.WORKERS))
        jobs = pending.jobs
        late = [job for job in jobs if isinstance(job, e.SaveIssued) and not job.before_forward]
        for job in jobs:
            if job not in late:
                self.copy(job)
        self.forward(batch)
        for job in late:
            self.copy(job)
        for job in jobs:
            self.observe(e.TransferReported.by([0], job.job_id, self.now()))
        self.process_batch_result({scheduled.request_id for scheduled in batch})

    def copy(self, job: e.Event) -> None:
        """Copy pages between device and host."""
        pairs = zip(job.block_ids, job.slots, strict=True)  # type: ignore[attr-defined]
        for index, slot in pairs:
            if isinstance(job, e.LoadIssued):
                self.device[index] = self.host[slot]
            else:
                self.host[slot] = self.device[index]

    def forward(self, batch: list[Scheduled]) -> None:
        """Compute the KV of each token. It depends on all tokens before it, whose KV must be right."""
        reqs = {req.rid: req for req in self.running_batch}
        for scheduled in batch:
            req = reqs[scheduled.request_id]
            for end in range(1, len(req.fill_ids) + 1):
                index, content = req.kv_indices[end - 1], req.fill_ids[:end]
                if end > scheduled.num_computed_tokens:
                    self.device[index] = content
                elif self.device.get(index) != content:
                    raise AssertionError(f"{req.rid} reads wrong KV for its token {end - 1}")

    def process_batch_result(self, rids: set[str]) -> None:
        """Add one token to each request. A finished one leaves its pages to the radix cache (`cache_finished_req`)."""
        for req in [req for req in self.running_batch if req.rid in rids]:
            req.output_ids += (1000 + len(req.fill_ids),)
            self.observe_keys(req)
            if len(req.output_ids) == req.max_new_tokens:
                num_tokens = len(req.fill_ids)
                self.observe(e.RequestFinished(req.rid, "FINISH_LENGTH", num_tokens - 1, num_tokens, self.now()))
                for end, index in enumerate(req.kv_indices, 1):
                    self.tree_cache.nodes.setdefault(req.fill_ids[:end], index)
                self.release(req)


def serve(log_dir: Path, reqs: Iterable[Req]) -> Scheduler:
    """Serve all requests."""
    scheduler = Scheduler(log_dir)
    for req in reqs:
        scheduler.add(req)
    while scheduler.waiting_queue or scheduler.running_batch:
        scheduler.run_batch()
    scheduler.run_batch()  # runs the saves of the last batch
    scheduler.store.close()
    return scheduler


if __name__ == "__main__":
    prompts = {"a": (1, 2, 3, 4, 5, 6, 7), "b": (1, 2, 3, 4, 5, 6, 8, 8), "c": (1, 2, 3, 4, 5, 6, 9, 9, 9)}
    ended = serve(Path(sys.argv[1]), [Req(rid, prompt, max_new_tokens=9) for rid, prompt in prompts.items()])
    print(f"{ended.num_retracted} retracted, {ended.num_loaded} tokens loaded back")
