"""Keys: what is saved under which key, and what is found under it."""

from kvledger.lifecycle.audit.keys.bytes_unchanged import BytesUnchanged
from kvledger.lifecycle.audit.keys.chunk_complete import ChunkComplete
from kvledger.lifecycle.audit.keys.cursor_le_frontier import CursorLeFrontier
from kvledger.lifecycle.audit.keys.failed_load_taint import FailedLoadTaint
from kvledger.lifecycle.audit.keys.key_identity import KeyIdentity
from kvledger.lifecycle.audit.keys.reset_epoch import ResetEpoch
from kvledger.lifecycle.audit.keys.settled_saved import SettledSaved
from kvledger.lifecycle.audit.keys.store_contiguous import StoreContiguous

CHECKERS = (
    KeyIdentity,
    ChunkComplete,
    CursorLeFrontier,
    StoreContiguous,
    SettledSaved,
    ResetEpoch,
    FailedLoadTaint,
    BytesUnchanged,
)
