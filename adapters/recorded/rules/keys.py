"""Keys of the blocks that a connector saves and loads: a rule that needs a decoder for the connector's metadata."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from kvledger.adapters.recorded import payloads
from kvledger.adapters.recorded.rules.copies import RuleOfTables
from kvledger.lifecycle import events as e
from kvledger.lifecycle import on
from kvledger.lifecycle.audit import AuditModel

MAX_KEYS = 1 << 20
"""Maximum number of different keys that are remembered. If there are more, it is not known which blocks are saved."""
MAX_PAGES = 1 << 16
"""Maximum number of saved pages whose digests are remembered. The oldest digests are forgotten first."""
MAX_ENDED = 1 << 10
"""Maximum number of ended lives whose keys are remembered, because a connector may save their blocks later."""
_IN_OWN_MEMORY = frozenset({"SimpleCPUOffloadMetadata", "OffloadingConnectorMetadata"})
"""Metadata classes of connectors whose store is empty when the engine starts."""
_OFFLOADING_SPECS = frozenset({None, "CPUOffloadingSpec"})

_Image = tuple[int, int, int, int]
"""(digest, block, group, rank)."""


class _Saved(NamedTuple):
    """The first save of a page."""

    key: bytes
    request_id: str
    sequence: int


class SavedUnderKey(RuleOfTables):
    """SAVED_UNDER_KEY: a load copies only blocks that were saved under the request's own keys.

    A block's key covers all tokens up to the end of the block, and all else that its KV depends on: LoRA adapter, media
    and cache salt. If a connector's keys leave out one of these, a request may get the KV of another request.

    Verifies: for blocks whose keys no save in the log has used:

    - A connector whose store is empty when the engine starts (`SimpleCPUOffloadConnector`; `OffloadingConnector` with
      `CPUOffloadingSpec`) does not load these blocks.
    - With digests, no connector loads these blocks with bytes that were saved under another key.

    Does not verify: connectors whose store outlives the engine or is shared, if the log has no digests; turns of a
    session after the first; anything in a log without its beginning. If the store outlives the engine, a block may have
    been saved under its own key before the log began. If the log has a save of the same bytes under another key, the
    rule then reports a load that is right.
    """

    rule = "SAVED_UNDER_KEY"

    def __init__(self, model: AuditModel) -> None:
        super().__init__(model)
        self._block_size = model.configuration.block_size
        self._knows_all = True
        self._saved: set[bytes] = set()
        """Keys of saved blocks."""
        self._nameless: dict[int, set[int]] = {}
        """Ordinal → indexes of saved blocks whose keys are not known yet."""
        self._images: OrderedDict[_Image, _Saved] = OrderedDict()
        self._unsaved: dict[int, frozenset[int]] = {}
        """Ordinal → blocks of the life's last load whose keys no save had used before vLLM claimed the load."""
        self._ended: OrderedDict[int, tuple[str, Sequence[bytes]]] = OrderedDict()
        """Ordinal → request id and keys of an ended life."""
        self._last_ended: dict[str, int] = {}
        """Request id → ordinal of the id's last life, if this life is in `_ended`."""
        self._continued: set[int] = set()
        """Ordinals of sessions that had another turn. Their keys do not cover their earlier saves."""
        self._has_sessions = False
        """Whether a session had another turn, so that some keys of saved blocks are unknown."""
        self._options: Mapping[str, Any] = {}
        self._is_in_own_memory: dict[str, bool] = {}
        """Place of a connector, as in `MetadataSeen` → whether its store was empty when the log began."""

    def begin(self) -> None:
        """Begin in the middle of a log: judge nothing, because earlier saves are not known."""
        self._knows_all = False

    @on(payloads.RecordingStarted)
    def _started(self, started: payloads.RecordingStarted) -> None:
        self._options = started.kv_transfer

    @on(payloads.MetadataSeen)
    def _seen(self, seen: payloads.MetadataSeen) -> None:
        is_in_own_memory = seen.metadata in _IN_OWN_MEMORY
        if seen.metadata == "OffloadingConnectorMetadata":
            is_in_own_memory = _spec_name(self._options, seen.place) in _OFFLOADING_SPECS
        self._is_in_own_memory[seen.place] = is_in_own_memory

    @on(payloads.Undecoded)
    def _undecoded(self, _undecoded: payloads.Undecoded) -> None:
        self._knows_all = False

    # --- what is saved ------------------------------------------------------------------------

    def _save(self, keys: Iterable[bytes]) -> None:
        self._saved.update(keys)
        if len(self._saved) > MAX_KEYS:
            self._knows_all = False
            self._saved.clear()

    @on(payloads.Transferred)
    def _copied(self, copy: payloads.Transferred) -> None:
        life = self.moment.life
        if not self._knows_all or life is None:
            return
        if copy.is_load:
            self._judge_load(copy)
            return
        table = self.table_of(copy)
        if table is None:
            self._save(life.keys)
            return
        if copy.first_block >= 0 and None in copy.places(table):  # TABLE_EQ reports this; what is saved is not known
            self._knows_all = False
            return
        copied = frozenset(copy.block_ids)
        num_groups = 1 if copy.group >= 0 else self._num_groups
        blocks = {place // num_groups for place, block_id in enumerate(table) if block_id in copied}
        self._save(life.keys[block] for block in blocks if block < len(life.keys))
        nameless = {block for block in blocks if block >= len(life.keys)}
        if nameless:
            self._nameless.setdefault(life.ordinal, set()).update(nameless)

    @on(payloads.TransferredFor)
    def _copied_for(self, copied: payloads.TransferredFor) -> None:
        if copied.copy.is_load or not self._knows_all:
            return
        life = self.lives.get(copied.request_id)
        ended = self._ended.get(self._last_ended.get(copied.request_id, -1))
        if life is None and ended is None:
            self._knows_all = False  # its tokens are not known
        for keys in (() if life is None else life.keys, () if ended is None else ended[1]):
            self._save(keys)

    @on(e.ChunkKeysObserved)
    def _named(self, event: e.ChunkKeysObserved) -> None:
        life = self.moment.life
        nameless = self._nameless.get(life.ordinal) if life is not None else None
        if life is None or not nameless:
            return
        if event.first_chunk <= min(nameless):
            self._save(life.keys[block] for block in nameless if block < len(life.keys))
        self._nameless[life.ordinal] = {block for block in nameless if block >= len(life.keys)}

    @on(e.SessionContinued)
    def _session_continued(self, _event: e.SessionContinued) -> None:
        if self.moment.life is not None:
            self._has_sessions = True
            self._continued.add(self.moment.life.ordinal)

    @on(e.RequestReleased)
    def _released(self, event: e.RequestReleased) -> None:
        life = self.moment.life
        if life is None or life.ordinal != event.ordinal:
            return
        self._nameless.pop(event.ordinal, None)
        if event.ordinal in self._continued:  # what it saved before its last turn has no key here
            self._continued.discard(event.ordinal)
            return
        self._ended[event.ordinal] = event.request_id, life.keys
        self._last_ended[event.request_id] = event.ordinal
        if len(self._ended) > MAX_ENDED:
            ordinal, (request_id, _) = self._ended.popitem(last=False)
            self._unsaved.pop(ordinal, None)
            if self._last_ended.get(request_id) == ordinal:
                del self._last_ended[request_id]

    # --- what is loaded -----------------------------------------------------------------------

    @on(e.LoadIssued)
    def _issued(self, event: e.LoadIssued) -> None:
        life = self.moment.life
        if not self._knows_all or life is None or event.ordinal in self._continued:
            return
        first, end = event.first_token // self._block_size, (event.first_token + event.num_tokens) // self._block_size
        blocks = range(first, min(end, len(life.keys)))
        # A key covers all tokens before its block, so an unsaved block before a saved one is a hole, not another key's.
        backwards = takewhile(lambda block: life.keys[block] not in self._saved, reversed(blocks))
        unsaved = frozenset(backwards)
        if unsaved:
            self._unsaved[event.ordinal] = unsaved
        else:
            self._unsaved.pop(event.ordinal, None)

    def _judge_load(self, copy: payloads.Transferred) -> None:
        """Judge a load, if the connector's store was empty when the log began."""
        life = self.moment.life
        unsaved = () if life is None else self._unsaved.get(life.ordinal, ())
        head, is_child, _ = copy.job.rpartition("/")
        if life is None or not unsaved or not self._is_in_own_memory.get(head + is_child, False):
            return
        # A running request may have saved these blocks of its output, whose keys are not known yet.
        unknown = {block for blocks in self._nameless.values() for block in blocks}
        left = sorted(block for block in unsaved if block not in unknown)
        if left and not self._has_sessions:
            detail = f"load {copy.job} copies block {left[0]} of the request, but no save had the block's key"
            del self._unsaved[life.ordinal]
            self.broken(detail)

    @on(e.PagesDigested)
    def _digested(self, event: e.PagesDigested) -> None:
        life = self.lives.of(event.ordinal)
        _, keys = self._ended.get(event.ordinal, ("", ())) if life is None else (life.request_id, life.keys)
        if not self._knows_all or event.ordinal in self._continued:
            return
        for block, digest in enumerate(event.digests, event.first_block):
            image = digest, block, event.group, event.rank
            if block >= len(keys):
                break
            if not event.is_load:
                self._images.setdefault(image, _Saved(keys[block], event.request_id, self.moment.sequence))
                if len(self._images) > MAX_PAGES:
                    self._images.popitem(last=False)
                continue
            saved = self._images.get(image) if block in self._unsaved.get(event.ordinal, ()) else None
            if saved is not None and saved.key != keys[block]:
                del self._unsaved[event.ordinal]
                detail = (
                    f"block {block} of the request was loaded with the bytes that {saved.request_id!r} saved under "
                    "another key, and no save had the block's own key; the connector's keys leave out what "
                    "distinguishes the two requests, for example the LoRA adapter, the media or the cache salt"
                )
                self.broken(detail, saved.sequence)
                return


def _spec_name(options: Mapping[str, Any], place: str) -> object:
    """Return the option `spec_name` of the OffloadingConnector at `place`; None: the option is not set.

    "not recorded" is returned if the log does not have the connector's options.
    """
    extra = options.get("kv_connector_extra_config") or {}
    if place:
        children = extra.get("connectors") if isinstance(extra, Mapping) else None
        number = int(place.strip("/")) if place.strip("/").isdigit() else -1
        child = children[number] if isinstance(children, list | tuple) and 0 <= number < len(children) else None
        if not isinstance(child, Mapping):
            return "not recorded"
        extra = child.get("kv_connector_extra_config") or {}
    return extra.get("spec_name") if isinstance(extra, Mapping) else "not recorded"
