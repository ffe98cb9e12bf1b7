"""Bytes: whether loaded pages have the bytes that were saved."""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Checker
from kvledger.lifecycle.audit.model import AuditModel
from kvledger.lifecycle.marks import on
from kvledger.lifecycle.reader.records import Life

MAX_PAGES = 1 << 16
"""Maximum number of pages whose saved digests are remembered. The oldest are forgotten first."""
_MAX_UNKNOWN = 1 << 16
"""Maximum number of chunks remembered as saved without digests. If there are more, all saves are forgotten."""
_MAX_ENDED = 1 << 10
"""Maximum number of ended lives whose keys are remembered, because a connector may save their pages later."""
_MAX_IMAGES = 16
"""A page with more different digests than this is not judged: each computation may give different last bits."""

_Page = tuple[bytes, int, int, int]
"""(key of the chunk in which the block ends, block, group, rank)."""
_Place = tuple[int, int, int]
"""(rank, group, block)."""


class _OfLife(msgspec.Struct):
    """The digests of one life."""

    ordinal: int
    generation: int
    life: Life
    seen: dict[_Place, tuple[int, int]] = {}
    """(rank, group, block) → (digest, sequence number of the event that has the digest), in this generation."""
    was_cut: bool = False
    """Whether a session's next turn may have replaced tokens. The life's keys may then not fit its earlier saves."""


class BytesUnchanged(Checker):
    """BYTES_UNCHANGED: a loaded page has the bytes that were saved for its tokens, and a full block does not change.

    Verifies: if the log has digests (`pages.digested`), a loaded page has the digest of a page that was saved after the
    last reset, for the same chunk, position, group and rank. The loaded page is checked in host memory before the load,
    and in its block after the load.
    Two digests of one full block of a request are equal while the request keeps its blocks. The checker names the first
    block that differs, and whether it already differed in host memory.
    Does not verify: pages without digests; partly filled blocks; pages whose save is not in the log or is more than
    65536 pages back; pages that were saved with more than 16 different digests; that the computed KV is right. If a
    save was reported only after a reminder, its pages are not verified, because the later report has no digests.
    """

    rule = "BYTES_UNCHANGED"

    def __init__(self, model: AuditModel) -> None:
        super().__init__(model)
        self._saved: OrderedDict[_Page, dict[int, int]] = OrderedDict()
        self._unknown: set[bytes] = set()
        """Keys of chunks that were saved without digests."""
        self._of: dict[str, _OfLife] = {}
        self._ended: OrderedDict[int, _OfLife] = OrderedDict()
        """Ordinal → ended life."""
        self._first_ordinal = 0
        """First ordinal of the lives that began after the last reset."""
        self._next_ordinal = 0

    @on(e.PagesDigested)
    def _digested(self, event: e.PagesDigested) -> None:
        life = self.lives.of(event.ordinal)
        self._next_ordinal = max(self._next_ordinal, event.ordinal + 1)
        for number, (digest, stored) in enumerate(zip(event.digests, event.stored, strict=False)):
            if digest != stored:
                detail = f"host memory had {_hex(stored)}, but the device has {_hex(digest)} after the load"
                self.broken(f"{_where(event, number)}: {detail}")
                return
        of_life = self._ended.get(event.ordinal) if life is None else self._of_generation(event, life)
        is_new = event.ordinal >= self._first_ordinal
        # An older life may load KV from before the reset. Other lives may later load what it saves.
        if of_life is not None and (is_new or not event.is_load):
            keeps_blocks = life is not None and event.generation == life.generation == of_life.generation
            self._compare(event, of_life, keeps_blocks=is_new and keeps_blocks)

    @on(e.TransferReported)
    def _reported(self, event: e.TransferReported) -> None:
        if not event.is_repeated:
            return
        # Digests come with the first report, which was lost.
        for save in filter(None, map(self.model.copies.get, event.job_ids)):
            if not save.is_load:
                self._unknown.update(save.keys)
        if len(self._unknown) > _MAX_UNKNOWN:
            self._forget_saves()

    def _forget_saves(self) -> None:
        self._saved.clear()
        self._unknown.clear()

    @on(e.RequestArrived)
    def _arrived(self, event: e.RequestArrived) -> None:
        self._end(self._of.pop(event.request_id, None))
        self._next_ordinal = max(self._next_ordinal, event.ordinal + 1)

    @on(e.SessionContinued)
    def _cut(self, event: e.SessionContinued) -> None:
        if self.moment.life is not None:
            of_life = self._of.setdefault(event.request_id, _of(self.moment.life))
            of_life.was_cut = True
            of_life.seen.clear()

    @on(e.TokensRolledBack)
    def _rolled_back(self, event: e.TokensRolledBack) -> None:
        if event.request_id in self._of:
            self._of[event.request_id].seen.clear()

    @on(e.RequestReleased)
    def _released(self, event: e.RequestReleased) -> None:
        if self.moment.life is not None and self.moment.life.ordinal == event.ordinal:
            self._end(self._of.pop(event.request_id, None) or _of(self.moment.life))

    def _end(self, of_life: _OfLife | None) -> None:
        if of_life is not None:
            of_life.seen.clear()
            self._ended[of_life.ordinal] = of_life
            if len(self._ended) > _MAX_ENDED:
                self._ended.popitem(last=False)

    @on(e.CacheReset)
    def _reset(self, _event: e.CacheReset) -> None:
        self._forget_saves()
        self._of.clear()
        self._ended.clear()
        self._first_ordinal = self._next_ordinal

    def _compare(self, event: e.PagesDigested, of_life: _OfLife, *, keeps_blocks: bool) -> None:
        size, chunk_size = self.configuration.block_size, self.configuration.chunk_size
        for number, digest in enumerate(event.digests):
            block = event.first_block + number
            chunk = ((block + 1) * size - 1) // chunk_size
            detail, evidence = "", 0
            keys = of_life.life.keys
            if chunk < len(keys):
                page = (keys[chunk], block, event.group, event.rank)
                detail, evidence = self._of_page(page, digest, of_life, event)
            if not detail and keeps_blocks:
                place = (event.rank, event.group, block)
                before, evidence = of_life.seen.setdefault(place, (digest, self.moment.sequence))
                if before != digest:
                    detail = (
                        f"the digest is now {_hex(digest)} and was {_hex(before)}, although the request kept its blocks"
                    )
            if detail:
                self.broken(f"{_where(event, number)}: {detail}", evidence)
                return  # later blocks mostly show the same error

    def _of_generation(self, event: e.PagesDigested, life: Life) -> _OfLife:
        of_life = self._of.get(event.request_id)
        if of_life is None or of_life.ordinal != event.ordinal:
            of_life = self._of[event.request_id] = _OfLife(event.ordinal, event.generation, life)
        elif event.generation > of_life.generation:
            of_life.generation = event.generation
            of_life.seen.clear()
        return of_life

    def _of_page(self, page: _Page, digest: int, of_life: _OfLife, event: e.PagesDigested) -> tuple[str, int]:
        if event.is_load:
            return ("", 0) if of_life.was_cut else self._loaded(page, digest, event)
        if of_life.was_cut:
            self._saved.pop(page, None)
        else:
            self._saved.setdefault(page, {}).setdefault(digest, self.moment.sequence)
            self._saved.move_to_end(page)
            if len(self._saved) > MAX_PAGES:
                self._saved.popitem(last=False)
        return "", 0

    def _loaded(self, page: _Page, digest: int, event: e.PagesDigested) -> tuple[str, int]:
        images = self._saved.get(page)
        if images is None or page[0] in self._unknown or len(images) > _MAX_IMAGES or digest in images:
            return "", 0
        saved = ", ".join(map(_hex, images))
        found = "at the load, host memory had" if event.stored else "after the load, the device has"
        return f"was saved as {saved}; {found} {_hex(digest)}", next(reversed(images.values()))


def _of(life: Life) -> _OfLife:
    return _OfLife(life.ordinal, life.generation, life)


def _where(event: e.PagesDigested, number: int) -> str:
    return f"block {event.first_block + number} of the table, group {event.group}, rank {event.rank}"


def _hex(digest: int) -> str:
    return f"{digest & (1 << 64) - 1:016x}"
