"""Names of the rules that kvledger checks while it serves. `docs/invariants.md` describes them."""

from __future__ import annotations

import enum


class Rule(enum.StrEnum):
    """A rule. If it is broken while kvledger serves, the event `invariant.violated` is recorded."""

    LEGAL_TRANSITION = "LEGAL_TRANSITION"
    ALLOC_MATCHES_LOOKUP = "ALLOC_MATCHES_LOOKUP"
    LOADABLE_AFTER_COMMIT = "LOADABLE_AFTER_COMMIT"
    TABLE_EQ = "TABLE_EQ"
    COMPLETION_ONCE = "COMPLETION_ONCE"
    LIVENESS = "LIVENESS"
    HANDLER_RAISED = "HANDLER_RAISED"
    HANDLER_CONTRACT = "HANDLER_CONTRACT"
    VLLM_CONTRACT = "VLLM_CONTRACT"
