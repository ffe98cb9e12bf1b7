"""Records a worker's hook calls in a log of the worker: each call before it is made, and its return or exception.

Calls in steps without work are frequent, and so are calls for layers after the first layer of a step. Such a call is
written only if it raises or reports something. No function here raises an exception of its own or reads KV.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from kvledger.adapters.recorded import payloads
from kvledger.adapters.recorder.log import RecorderLog
from kvledger.adapters.vllm.journal import Fallback, guarded
from kvledger.lifecycle import logged_request_id, raise_if_unstoppable

_BY_LAYER: Final = frozenset({"wait_for_layer_load", "save_kv_layer"})
_WRITTEN: Final = frozenset(
    {
        "register_kv_caches",
        "register_cross_layers_kv_cache",
        "unregister_kv_caches",
        "restore_kv_caches",
        "get_handshake_metadata",
        "handle_preemptions",
        "start_load_kv",
        "wait_for_save",
        "get_finished",
        "get_transfer_results",
        "get_block_ids_with_load_errors",
        "build_connector_worker_meta",
        "shutdown",
    }
)
"""Hooks that wait or move bytes. A call of another hook, unless it is in `_BY_LAYER`, is written only if it raises."""
_NOWHERE: Final = -1
_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})
HOOKS: Final = {
    "step_begins": Fallback(),
    "step_ends": Fallback(),
    "shutdown": Fallback(),
    "_begins": Fallback(answer=False),
    "_raised": Fallback(),
    "_returned": Fallback(),
}
"""Method that the recorder's connector calls, or that `call` uses → the value to return if the method raises."""


@guarded(HOOKS)
class WorkerRecording:
    """Records the hook calls of one rank."""

    def __init__(self, log: RecorderLog, started: payloads.WorkerStarted) -> None:
        self.log = log
        self._step = _NOWHERE
        self._metadata: object = None
        """Metadata of the current step; None outside a step."""
        self._is_written = True
        self._first_layers: set[str] = set()
        """Hooks that were called for a layer of this step."""
        log.note(started)
        log.commit()

    def hook_failed(self, hook: str, _request_id: str, error: BaseException) -> None:
        """Stop recording, because the recorder itself failed. The decorator `guarded` calls this method."""
        self.log.end(hook, error)

    def call(
        self,
        hook: str,
        forward: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] = _NOTHING,
    ) -> Any:
        """Call a hook of the wrapped connector and record the call. Return the hook's answer."""
        is_written = self._begins(hook, args)
        began_ns = self.log.now()
        try:
            answer = forward(*args, **kwargs)
        except BaseException as error:
            raise_if_unstoppable(error)
            self._raised(hook, args, error, is_written=is_written)
            raise
        self._returned(hook, answer, began_ns, is_written=is_written)
        return answer

    def step_begins(self, metadata: object) -> None:
        """Begin the step that has this metadata, unless the step has begun already.

        A step begins when its metadata is bound, or before that, when preemptions are handled.
        """
        if metadata is not self._metadata:
            self._metadata = metadata
            self._step += 1
            self._first_layers.clear()
            self._is_written = carries_work(metadata)

    def step_ends(self) -> None:
        """End the current step."""
        self._metadata, self._is_written = None, True

    def shutdown(self) -> None:
        """Write the last events and close the log."""
        self.log.close()

    def _begins(self, hook: str, args: tuple[Any, ...]) -> bool:
        if hook == "handle_preemptions" and args:
            self.step_begins(args[0])
        if hook in _BY_LAYER:
            if hook in self._first_layers:
                return False
            self._first_layers.add(hook)
        elif hook not in _WRITTEN:
            return False
        if not self._is_written or self.log.is_ended:
            return False
        self._write_call(hook, args)
        self.log.commit()
        return True

    def _write_call(self, hook: str, args: tuple[Any, ...]) -> None:
        step = _NOWHERE if self._metadata is None else self._step
        layer = str(args[0]) if hook in _BY_LAYER and args else ""
        self.log.note(payloads.Called(hook, step, layer))

    def _raised(self, hook: str, args: tuple[Any, ...], error: BaseException, *, is_written: bool) -> None:
        if self.log.is_ended:
            return
        if not is_written:
            self._write_call(hook, args)
        self.log.hook_failed(hook, "", error)
        self.log.commit()

    def _returned(self, hook: str, answer: object, began_ns: int, *, is_written: bool) -> None:
        if self.log.is_ended:
            return
        reported = _reported(hook, answer)
        if reported is not None:
            self.log.note(reported)
        if is_written:
            self.log.note(payloads.Returned(hook, self.log.now() - began_ns))
        self.log.commit()


def carries_work(metadata: object) -> bool:
    """Whether a connector's metadata has work for the workers.

    Numbers, texts, False, None and empty collections are no work. Every other object is.
    """
    fields = getattr(metadata, "__dict__", None)
    return fields is None or any(_is_work(field) for field in fields.values())


def _is_work(field: object) -> bool:
    if field is None or field is False or (isinstance(field, int | float | str | bytes) and field is not True):
        return False
    if isinstance(field, KVConnectorMetadata):
        return carries_work(field)
    if isinstance(field, list | tuple | set | frozenset | dict):
        children = field.values() if isinstance(field, dict) else field
        return any(not isinstance(child, KVConnectorMetadata) or carries_work(child) for child in children)
    return True


def _reported(hook: str, answer: Any) -> payloads.Reported | None:
    """Return the event with the reports in a hook's answer; None if the answer reports nothing."""
    if not answer:
        return None
    if hook == "get_finished":
        ends = (answer[0], answer[1], None)
    elif hook == "get_transfer_results":
        ends = (answer.finished_sending, answer.finished_recving, answer.failed_recving)
    elif hook == "get_block_ids_with_load_errors":
        return payloads.Reported(hook, invalid_block_ids=tuple(sorted(answer)))
    else:
        return None
    sending, receiving, failed = [tuple(sorted(map(logged_request_id, found or ()))) for found in ends]
    reported = payloads.Reported(hook, sending, receiving, failed)
    return None if reported == payloads.Reported(hook) else reported
