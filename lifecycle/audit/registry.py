"""The checkers of the standard core, by their rules."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

from kvledger.lifecycle.audit.alloc_matches_lookup import AllocMatchesLookup
from kvledger.lifecycle.audit.block_reuse_fenced import BlockReuseFenced
from kvledger.lifecycle.audit.checker import AnyChecker
from kvledger.lifecycle.audit.chunk_complete import ChunkComplete
from kvledger.lifecycle.audit.completion_once import CompletionOnce
from kvledger.lifecycle.audit.cursor_le_frontier import CursorLeFrontier
from kvledger.lifecycle.audit.defer_bounded import DeferBounded
from kvledger.lifecycle.audit.delay_free_contract import DelayFreeContract
from kvledger.lifecycle.audit.evict_idle_only import EvictIdleOnly
from kvledger.lifecycle.audit.external_zero_no_load import ExternalZeroNoLoad
from kvledger.lifecycle.audit.failed_load_taint import FailedLoadTaint
from kvledger.lifecycle.audit.finish_is_last import FinishIsLast
from kvledger.lifecycle.audit.gen_isolation import GenIsolation
from kvledger.lifecycle.audit.group_agreement import GroupAgreement
from kvledger.lifecycle.audit.hit_pinned import HitPinned
from kvledger.lifecycle.audit.key_identity import KeyIdentity
from kvledger.lifecycle.audit.last_token import LastToken
from kvledger.lifecycle.audit.legal_transition import LegalTransition
from kvledger.lifecycle.audit.liveness import Liveness
from kvledger.lifecycle.audit.load_dst_exclusive import LoadDstExclusive
from kvledger.lifecycle.audit.load_xor_stores import LoadXorStores
from kvledger.lifecycle.audit.loadable_after_commit import LoadableAfterCommit
from kvledger.lifecycle.audit.longest_hit import LongestHit
from kvledger.lifecycle.audit.lookup_pure import LookupPure
from kvledger.lifecycle.audit.pin_balance import PinBalance
from kvledger.lifecycle.audit.rank_agreement import RankAgreement
from kvledger.lifecycle.audit.recorded import Recorded
from kvledger.lifecycle.audit.release_all import ReleaseAll
from kvledger.lifecycle.audit.reset_epoch import ResetEpoch
from kvledger.lifecycle.audit.resume_covers_output import ResumeCoversOutput
from kvledger.lifecycle.audit.rollback_observed import RollbackObserved
from kvledger.lifecycle.audit.settled_saved import SettledSaved
from kvledger.lifecycle.audit.slot_exclusive import SlotExclusive
from kvledger.lifecycle.audit.src_block_owned import SrcBlockOwned
from kvledger.lifecycle.audit.src_block_stable import SrcBlockStable
from kvledger.lifecycle.audit.step_sum import StepSum
from kvledger.lifecycle.audit.store_contiguous import StoreContiguous
from kvledger.lifecycle.audit.table_eq import TableEq
from kvledger.lifecycle.audit.token_conservation import TokenConservation
from kvledger.lifecycle.audit.waiting_kept import WaitingKept

RULES: MappingProxyType[str, Callable[[], AnyChecker]] = MappingProxyType(
    {
        LegalTransition.rule: LegalTransition,
        AllocMatchesLookup.rule: AllocMatchesLookup,
        LookupPure.rule: LookupPure,
        ExternalZeroNoLoad.rule: ExternalZeroNoLoad,
        LastToken.rule: LastToken,
        ChunkComplete.rule: ChunkComplete,
        SrcBlockOwned.rule: SrcBlockOwned,
        LoadableAfterCommit.rule: LoadableAfterCommit,
        CompletionOnce.rule: CompletionOnce,
        GenIsolation.rule: GenIsolation,
        EvictIdleOnly.rule: EvictIdleOnly,
        LoadDstExclusive.rule: LoadDstExclusive,
        ReleaseAll.rule: ReleaseAll,
        TokenConservation.rule: TokenConservation,
        FinishIsLast.rule: FinishIsLast,
        ResetEpoch.rule: ResetEpoch,
        SrcBlockStable.rule: SrcBlockStable,
        DelayFreeContract.rule: DelayFreeContract,
        DeferBounded.rule: DeferBounded,
        FailedLoadTaint.rule: FailedLoadTaint,
        GroupAgreement.rule: GroupAgreement,
        HitPinned.rule: HitPinned,
        TableEq.rule: TableEq,
        CursorLeFrontier.rule: CursorLeFrontier,
        StoreContiguous.rule: StoreContiguous,
        SettledSaved.rule: SettledSaved,
        PinBalance.rule: PinBalance,
        RankAgreement.rule: RankAgreement,
        BlockReuseFenced.rule: BlockReuseFenced,
        ResumeCoversOutput.rule: ResumeCoversOutput,
        RollbackObserved.rule: RollbackObserved,
        Liveness.rule: Liveness,
        LoadXorStores.rule: LoadXorStores,
        KeyIdentity.rule: KeyIdentity,
        SlotExclusive.rule: SlotExclusive,
        WaitingKept.rule: WaitingKept,
        LongestHit.rule: LongestHit,
        StepSum.rule: StepSum,
        Recorded.rule: Recorded,
    }
)
"""Rule -> how to make its checker."""
