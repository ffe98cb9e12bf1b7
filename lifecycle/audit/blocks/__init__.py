"""Blocks: out of which ones and into which ones is copied, and who has them meanwhile."""

from kvledger.lifecycle.audit.blocks.block_reuse_fenced import BlockReuseFenced
from kvledger.lifecycle.audit.blocks.delay_free_contract import DelayFreeContract
from kvledger.lifecycle.audit.blocks.group_agreement import GroupAgreement
from kvledger.lifecycle.audit.blocks.load_dst_exclusive import LoadDstExclusive
from kvledger.lifecycle.audit.blocks.load_xor_stores import LoadXorStores
from kvledger.lifecycle.audit.blocks.src_block_owned import SrcBlockOwned
from kvledger.lifecycle.audit.blocks.src_block_stable import SrcBlockStable
from kvledger.lifecycle.audit.blocks.table_eq import TableEq

CHECKERS = (
    TableEq,
    SrcBlockOwned,
    SrcBlockStable,
    LoadDstExclusive,
    LoadXorStores,
    BlockReuseFenced,
    DelayFreeContract,
    GroupAgreement,
)
