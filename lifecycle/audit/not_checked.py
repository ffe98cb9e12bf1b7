"""Rules that a log of today cannot decide, and why. A reader must not take silence about them for soundness."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

NOT_CHECKED: Mapping[str, str] = MappingProxyType(
    {
        "HIT_PINNED": "pins are folded from answers, not recorded; EVICT_IDLE_ONLY checks what they are for",
        "PIN_BALANCE": "pins are folded from answers, not recorded",
        "RESUME_COVERS_OUTPUT": "the scheduler's own token count is recorded only as the lookup's",
        "TABLE_EQ": "the scheduler's table is not recorded where it agrees; a difference seen live is under RECORDED",
        "BLOCK_REUSE_FENCED": "the order of copies and forwards on the device is not recorded",
        "CURSOR_LE_FRONTIER": "the save cursor is folded, not recorded; CHUNK_COMPLETE checks what it is for",
        "STORE_CONTIGUOUS": "a chunk left out because it was saved already has no event",
        "RANK_AGREEMENT": "which jobs a rank was given is not recorded; COMPLETION_ONCE checks that all report",
        "LOAD_XOR_STORES": "kvledger promises it per block, not per request; LOAD_DST_EXCLUSIVE checks that",
        "ROLLBACK_OBSERVED": "the scheduler's own count of computed tokens is recorded only where it differs",
        "LIVENESS": "a log may end before a report is due; a silent job seen live is under RECORDED",
        "STEP_WHILE_PENDING": "idle steps of the engine are not recorded",
        "KEY_IDENTITY": "tokens never enter the log, only keys made from them",
        "ROUNDTRIP": "bytes of the KV cache never enter the log",
        "EVENTS_EQ_RESIDENCY": "published KV events are not recorded",
    }
)
"""Rule -> reason."""
