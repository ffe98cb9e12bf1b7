"""HANDLER_CONTRACT: checks the decisions of a state handler before they are recorded.

A handler may be foreign code. With these checks, the log stays readable, a handler can decide only about its own
request, and no other request's blocks, slots or jobs are changed. Handlers of this package are not checked here: types
and tests check them. This module checks neither whether a decision is good nor whether vLLM accepts it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Union

import attrs
import msgspec

from kvledger.lifecycle import events as e
from kvledger.lifecycle.core import Core
from kvledger.lifecycle.errors import QuotesNothing, raise_if_unstoppable
from kvledger.lifecycle.events import NO_SLOT, trigger_of
from kvledger.lifecycle.projections import Projections
from kvledger.lifecycle.projections.copies import CopyKind
from kvledger.lifecycle.projections.request_record import RequestRecord
from kvledger.lifecycle.states import RequestState, TrustRegion
from kvledger.lifecycle.turn import Turn

_NOT_OF_HANDLERS = (
    *(e.LoadCompleted, e.LoadFailed, e.SaveCompleted, e.SaveFailed, e.ChunksTainted),
    e.ExtensionStopped,
)
"""Decisions that no handler may make. They follow from reports, or from extension code that raised."""
_OWN = "kvledger.lifecycle."
_encode = msgspec.msgpack.Encoder(enc_hook=operator.index).encode  # like `codec.encode_events`
_SAVES = (e.SaveIssued, e.TailSaveIssued)
_OF_LOST_BLOCKS = (*_SAVES, e.SaveDeclined, e.ChunksEvicted, e.TransferAwaited)
"""Decisions that may name the request's previous generation, whose blocks vLLM took and has not overwritten yet."""
_JOBS = (e.LoadIssued, *_SAVES)


class DecisionRefused(QuotesNothing, ValueError):
    """A handler made a decision that it must not make. The message contains the reason, and no text of the decision."""


@attrs.frozen
class Checked:
    """Wraps a method of a foreign handler, and checks each of its decisions before the decision is recorded."""

    method: Callable[..., object]
    core: Core
    projections: Projections
    extension: str = ""
    """Name of the extension that the method belongs to; empty if it belongs to none."""
    _may_decide: tuple[type[e.Event], ...] = attrs.field(init=False)
    _decode: Callable[[bytes], Any] = attrs.field(init=False)

    @_may_decide.default
    def _decisions(self) -> tuple[type[e.Event], ...]:
        return tuple(event_class for event_class in self.core.decisions if event_class not in _NOT_OF_HANDLERS)

    @_decode.default
    def _decoder(self) -> Callable[[bytes], Any]:
        return msgspec.msgpack.Decoder(Union[self._may_decide]).decode  # noqa: UP007 -- made from a tuple

    @classmethod
    def unless_own(cls, method: Callable[..., None], core: Core, projections: Projections) -> Callable[..., None]:
        """Return the method itself if it belongs to this package, otherwise a `Checked` that wraps it."""
        module = str(getattr(getattr(method, "__func__", method), "__module__", ""))
        return method if module.startswith(_OWN) else cls(method, core, projections)

    def __call__(self, turn: Turn, *arguments: object) -> None:
        """Call the method with a copy of the turn. After the first refused decision, the copy accepts no more.

        Raises:
            DecisionRefused: a decision was refused, even if the method caught the error. Or the method returned a
                value, or did not release a finished request that has no copy in flight.
        """
        refused: list[BaseException] = []

        def check(decision: e.Event) -> e.Event:
            if not self.projections.extensions.takes_part(self.extension):
                refused.append(DecisionRefused("the extension is stopped"))
            if not refused:
                try:
                    return self._copied(decision, turn.record, turn.cause)
                except BaseException as error:  # noqa: BLE001 -- what cannot be judged is not recorded either
                    raise_if_unstoppable(error)
                    refused.append(error)
            raise refused[0]

        try:
            returned = self.method(turn.altered(check), *arguments)
        except Exception as error:
            if refused and error is not refused[0]:
                raise refused[0] from error
            raise
        finally:
            refused.append(DecisionRefused("the turn is over"))  # in case the method keeps it
        if len(refused) > 1:  # the method caught a refusal
            raise refused[0]
        if returned is not None:
            message = f"a {type(returned).__name__} was returned; return None, and pass each decision to `turn.decide`"
            raise DecisionRefused(message)
        record = turn.record
        is_known = self.projections.tracker.get(record.request_id) is record
        is_idle = is_known and not self.projections.jobs.owes(record.ordinal)
        if is_idle and record.path == RequestState.FINISHED:  # a sub-state of an extension may keep it
            message = "a finished request without a copy in flight was not released"
            raise DecisionRefused(message)

    def _copied(self, decision: object, record: RequestRecord, cause: int) -> e.Event:
        """Return the decision as a reader will decode it from the log; raise `DecisionRefused` if it is not allowed."""
        name = type(decision).__name__
        if not isinstance(decision, self._may_decide):
            message = f"{name} is no decision that a handler may make"
            raise DecisionRefused(message)
        try:
            copied: Any = self._decode(_encode(decision))
        except Exception as error:
            message = f"{name} has fields that cannot be read back ({type(error).__name__})"
            raise DecisionRefused(message) from error
        reason = self._reason_against(copied, record, cause)
        if reason:
            message = f"{name}: {reason}"
            raise DecisionRefused(message)
        event: e.Event = copied
        return event

    def _reason_against(self, decision: Any, record: RequestRecord, cause: int) -> str:  # noqa: ANN401 -- any decision
        if (decision.request_id, decision.ordinal) != (record.request_id, record.ordinal):
            return "it is about another request"
        generations = (record.generation, record.generation - isinstance(decision, _OF_LOST_BLOCKS))
        if decision.generation not in generations:
            return f"generation {decision.generation} is not the request's"
        if decision.cause != cause:
            return f"its cause is {decision.cause}, but the observation has sequence number {cause}"
        if isinstance(decision, e.ChunksEvicted):
            if decision.keys and self.projections.pool.forest.may_leave(decision.keys):
                return ""
            return "a chunk is not in the pool, is named twice, is in use, or is continued by a chunk that stays"
        return self._reason_against_event(decision, record) if isinstance(decision, e.RequestEvent) else ""

    def _reason_against_event(self, decision: Any, record: RequestRecord) -> str:  # noqa: ANN401 -- see above
        legal = self.core.tables.legal.get(trigger_of(decision))
        if legal is not None and (record.state, record.blocks) not in legal:
            return f"it is not legal in state {record.state}, blocks {record.blocks}"
        if isinstance(decision, _JOBS):
            return self._reason_against_job(decision, record)
        return self._reason_against_other(decision, record)

    def _reason_against_deferral(self, decision: e.LookupDeferred, record: RequestRecord) -> str:
        job = self.projections.jobs.get(decision.job_id)
        is_load = job is not None and job.kind is CopyKind.LOAD
        counts = {record.next_deferral(decision.job_id, is_shared=is_shared) for is_shared in (False, is_load)}
        if (
            decision.num_deferred in counts
            and decision.num_deferred <= self.projections.configuration.max_deferred_lookups
        ):
            return ""
        return f"it is deferral {max(counts)} in a row: too many, or num_deferred {decision.num_deferred} is wrong"

    def _reason_against_other(self, decision: Any, record: RequestRecord) -> str:  # noqa: ANN401 -- see above
        if isinstance(decision, e.LookupDeferred):
            return self._reason_against_deferral(decision, record)
        if isinstance(decision, e.ExtensionDecided):
            if all(extension.payload_of(decision) is None for extension in self.core.extensions):
                return "no extension of this core has such an event"
        elif isinstance(decision, e.TransferAwaited):
            job = self.projections.jobs.get(decision.job_id)
            if job is None or job.ordinal != record.ordinal:
                return f"job {decision.job_id} is not in flight for this request"
        elif isinstance(decision, e.RequestReleased) and self.projections.jobs.owes(record.ordinal):
            return "a copy of this request is in flight"
        return ""

    def _reason_against_job(self, job: e.LoadIssued | e.SaveIssued | e.TailSaveIssued, record: RequestRecord) -> str:
        slots, next_job_id = self.projections.slots, self.projections.jobs.next_job_id
        stored = [slot for slot in job.slots if slot != NO_SLOT]
        if job.job_id != next_job_id:
            return f"the next job has number {next_job_id}, not {job.job_id}"
        if len(job.slots) != len(job.block_ids) or min(job.block_ids, default=-1) < 0:
            return f"it has {len(job.slots)} slots for {len(job.block_ids)} blocks, or a negative block id"
        if not all(0 <= slot < slots.num_slots for slot in stored):
            return f"a slot is outside of the pool, which has {slots.num_slots} slots"
        return "" if isinstance(job, e.LoadIssued) else self._reason_against_save(job, stored, record)

    def _reason_against_save(
        self, job: e.SaveIssued | e.TailSaveIssued, stored: list[int], record: RequestRecord
    ) -> str:
        num_keys = len(record.keys)
        chunks = job.chunks if isinstance(job, e.SaveIssued) else ()
        if record.trust is TrustRegion.QUARANTINED:
            return "the request is quarantined, so nothing of it may be saved"
        if len(set(stored)) < len(stored) or any(map(self.projections.slots.num_references, stored)):
            return "a slot is in use, or is named twice"
        if list(chunks) != sorted(set(chunks)) or not all(0 <= chunk < num_keys for chunk in chunks):
            return f"its chunks are not ascending, or not among the {num_keys} chunks that have a key"
        return ""
