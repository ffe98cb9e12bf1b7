"""Lives: in which states a request may be, which life of an id is meant, and when it is over."""

from kvledger.lifecycle.audit.lives.finish_is_last import FinishIsLast
from kvledger.lifecycle.audit.lives.gen_isolation import GenIsolation
from kvledger.lifecycle.audit.lives.legal_transition import LegalTransition
from kvledger.lifecycle.audit.lives.release_all import ReleaseAll

CHECKERS = (
    LegalTransition,
    GenIsolation,
    FinishIsLast,
    ReleaseAll,
)
