"""What whoever builds an index knew at its end, so that an index of a log that has grown is continued, not built anew.

It holds lives, stories and chunks that point at one another, so it is pickled. The file is the user's own and private,
and only kvledger's classes are made from it: it can be false, like every index, and it can run nothing.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import io
import pickle
import zlib
from collections.abc import Iterator

import attrs

from kvledger.adapters.reading.requests import Requests, RequestSummary
from kvledger.adapters.reasons import Admission, ChunkFact, Lookup, Memory, Recomputation, Span, Story, Sums
from kvledger.adapters.reasons.chunk_history import ChunkHistory, SaveUnderWay, Watch
from kvledger.adapters.reasons.life import Answer, Life, Tail
from kvledger.adapters.reasons.lives import Lives
from kvledger.adapters.reasons.memory import Load
from kvledger.lifecycle import Core, LedgerConfiguration
from kvledger.lifecycle.snapshots import state_fingerprint

_CONTAINERS = frozenset(
    {("collections", "Counter"), ("collections", "OrderedDict"), ("builtins", "set"), ("builtins", "frozenset")}
)


@attrs.define
class LifeSpan:
    """One life of a request, and between which events its own lie, both included."""

    summary: RequestSummary
    first_sequence: int
    last_sequence: int


@attrs.define
class IndexMemory:
    """Everything that goes on: what is over is in the index."""

    requests: Requests = attrs.field(factory=Requests)
    lives: dict[str, LifeSpan] = attrs.field(factory=dict)
    """Those that are not released."""
    job_owners: dict[int, str] = attrs.field(factory=dict)
    num_batches: int = 0
    time_ns: int = 0
    """The latest time before the last place at which reading can begin."""
    accounts: Memory | None = None
    projections: bytes = b""
    """As `lifecycle.snapshots` captures them; empty where they cannot be folded on."""


REMEMBERED: tuple[type, ...] = (
    *(IndexMemory, LifeSpan, RequestSummary, Memory, Load, Life, Tail, Answer, Watch, SaveUnderWay, ChunkFact),
    *(Sums, Span, Story, Lookup, Admission, Recomputation),
)
"""The attrs classes of which a memory consists."""


def memory_fingerprint(core: Core, configuration: LedgerConfiguration) -> str:
    """What must be equal for a memory to mean the same: the layout of its classes, and what the projections hold."""
    layout = [(kind.__name__, [field.name for field in attrs.fields(kind)]) for kind in REMEMBERED]
    layout += [(type(made).__name__, sorted(vars(made))) for made in (ChunkHistory(), Lives(), Requests())]
    return hashlib.blake2b(f"{layout} {state_fingerprint(core, configuration)}".encode(), digest_size=16).hexdigest()


class MemoryUnusable(Exception):
    """The bytes are no memory that this version can go on from."""


def encode_memory(memory: IndexMemory) -> bytes:
    """For an index."""
    with _without_collecting():
        return zlib.compress(pickle.dumps(memory, protocol=5), 1)


def decode_memory(stored: bytes) -> IndexMemory:
    """The other way round.

    Raises:
        MemoryUnusable: for whatever reason; then the index is built anew.
    """
    try:
        with _without_collecting():
            memory = _OwnClassesOnly(io.BytesIO(zlib.decompress(stored))).load()
    except Exception as error:
        raise MemoryUnusable(f"{type(error).__name__}: {error}") from error
    if not isinstance(memory, IndexMemory):
        raise MemoryUnusable(f"it holds {type(memory).__name__}")
    return memory


@contextlib.contextmanager
def _without_collecting() -> Iterator[None]:
    """Hundreds of thousands of objects are made, and none of them is garbage: looking for it doubles the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _OwnClassesOnly(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> object:
        """Refuse before importing: only classes, by their own names, of the rooms whose objects are remembered."""
        is_own = module_name.startswith(
            ("kvledger.lifecycle.", "kvledger.adapters.reading.", "kvledger.adapters.reasons.")
        )
        if "." not in global_name and (is_own or (module_name, global_name) in _CONTAINERS):
            found: object = super().find_class(module_name, global_name)
            if isinstance(found, type) and found.__module__ == module_name:
                return found
        raise pickle.UnpicklingError(f"{module_name}.{global_name} does not belong into an index")
