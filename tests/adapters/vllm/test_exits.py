"""Code that raises no `Exception`: `sys.exit()` in a handler, say, ended the engine and every request in it.

Whatever somebody else's code raises, the engine serves on. What has to end the process still does.
"""

from __future__ import annotations

import ast
import inspect
import logging
import signal
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from sim.broken_copies import BROKEN
from sim.starving import live
from starvation_guard import StarvationGuard, StarvingRequests, Watching

import kvledger.adapters.recorder
import kvledger.adapters.vllm
from kvledger.adapters.recorder import page_digests, recording, worker_recording
from kvledger.adapters.recorder.connector import KVLedgerRecorder
from kvledger.adapters.tools.logs.log import open_log
from kvledger.adapters.vllm import scheduler_side
from kvledger.adapters.vllm.async_copies import AsyncCopies
from kvledger.adapters.vllm.connector import KVLedgerConnector
from kvledger.adapters.vllm.journal import Fallback, guarded
from kvledger.lifecycle import Extension, ProjectionSpec, RequestState, StateHandler, on
from kvledger.lifecycle import events as e
from kvledger.lifecycle.handlers import Running
from kvledger.storage.kv import CopyResult

pytestmark = pytest.mark.scheduler


class OfSomebody(BaseException):
    """No `Exception`, as some libraries have them."""


RAISED = pytest.mark.parametrize("raised", [SystemExit(3), OfSomebody(BROKEN)], ids=["SystemExit", "somebody's own"])


def small(make_engine: Any, **options: Any) -> Any:
    """An engine for the crowd in which every recovery needs a load."""
    return make_engine(num_blocks=14, chunk_size=8, enable_prefix_caching=False, replays=False, **options)


def serve(engine: Any) -> None:
    """Serve the crowd; all outputs are whole and right."""
    engine.add_crowd()
    engine.run()
    assert {len(output) for output in engine.outputs.values()} == {50}
    engine.check_outputs()


def raising(raised: BaseException) -> Any:
    """A function that raises it, whatever it is given."""

    def call(*_arguments: Any, **_options: Any) -> Any:
        raise raised

    return call


@RAISED
def test_a_handler(make_engine: Any, raised: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """It costs its request the cache."""
    handler = type("Broken", (Running,), {"request_preempted": raising(raised)})
    module = types.ModuleType("broken_handlers")
    module.__dict__["Broken"] = handler
    monkeypatch.setitem(sys.modules, "broken_handlers", module)
    engine = small(make_engine, handlers=["broken_handlers:Broken"])
    serve(engine)
    violations = engine.logged(e.InvariantViolated)
    assert {violation.rule for violation in violations} == {"HANDLER_RAISED"}
    assert all(violation.detail.startswith(type(raised).__name__) for violation in violations)


def of_extension(what: str, raised: BaseException) -> Extension:
    """An extension of which this part raises."""

    class FoldsNoPreemption(StarvingRequests):
        @on(e.RequestPreempted)
        def _preempted(self, _event: e.RequestPreempted, _sequence: int) -> None:
            raise raised

    handler = type("Watches", (Watching,), {"state": RequestState.RUNNING, "request_preempted": raising(raised)})
    parts: dict[str, dict[str, Any]] = {
        "handler": {"handlers": (handler,)},
        "projection": {"projections": (ProjectionSpec("starving", lambda _its: FoldsNoPreemption()),)},
        "keeps": {"keeps": raising(raised)},
    }
    extension: Extension = type("Broken", (StarvationGuard,), parts[what])()
    return extension


@RAISED
@pytest.mark.parametrize("what", ["handler", "projection", "keeps"])
def test_an_extension(tmp_path: Path, what: str, raised: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stopped."""
    module = types.ModuleType("broken_extension")
    module.__dict__["Broken"] = type(of_extension(what, raised))
    monkeypatch.setitem(sys.modules, "broken_extension", module)
    engine = live(tmp_path, ["broken_extension:Broken"])
    assert [len(output) for output in engine.outputs.values()] == [110] * len(engine.outputs)
    events = [event for _, event in open_log(next(tmp_path.iterdir())).events()]
    (stopped,) = [event for event in events if isinstance(event, e.ExtensionStopped)]
    assert stopped.error.startswith(f"{type(raised).__name__} in ")


class Fading:
    """A request of which one attribute cannot be read any more."""

    def __init__(self, request: Any, attribute: str, raised: BaseException) -> None:
        self._request = request
        self._attribute = attribute
        self._raised = raised

    def __getattr__(self, name: str) -> Any:
        if name == self._attribute:
            raise self._raised
        return getattr(self._request, name)


@RAISED
@pytest.mark.parametrize("attribute", ["num_tokens", "block_hashes"])
@pytest.mark.parametrize("hook", ["on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc"])
def test_a_request_that_cannot_be_read(make_engine: Any, hook: str, attribute: str, raised: BaseException) -> None:
    """The hook answers as without a cache."""
    engine = small(make_engine)
    connector = engine.connector
    original = getattr(connector, hook)
    given: list[int] = []

    def call(request: Any, *arguments: Any) -> Any:
        given.append(1)
        return original(Fading(request, attribute, raised) if len(given) == 1 else request, *arguments)

    setattr(connector, hook, call)
    serve(engine)
    assert all(failed.error.startswith(type(raised).__name__) for failed in engine.logged(e.HookFailed))


@pytest.mark.parametrize("raised", [SystemExit(3), ValueError()], ids=["SystemExit", "ValueError"])
def test_a_filter_of_the_servers_logging(
    make_engine: Any, raised: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Incident: a hook failed, the message about it raised, and the engine ended."""
    logger = logging.getLogger("vllm.kvledger")
    monkeypatch.setattr(logger, "filters", [raising(raised)])
    engine = small(make_engine)
    original, given = engine.connector.get_num_new_matched_tokens, []

    def call(request: Any, *arguments: Any) -> Any:
        given.append(1)
        return original(Fading(request, "num_tokens", ValueError()) if len(given) == 1 else request, *arguments)

    engine.connector.get_num_new_matched_tokens = call
    serve(engine)
    assert engine.logged(e.HookFailed)


class Failing:
    """A copy that raises where it is asked for something."""

    def __init__(self, where: str, raised: BaseException) -> None:
        self._where = where
        self._raised = raised

    def _ask(self, where: str) -> None:
        if where == self._where:
            raise self._raised

    def done(self) -> bool:
        """Whether it is over."""
        self._ask("done")
        return True

    def precede(self) -> None:
        """Nothing comes after it."""
        self._ask("precede")

    def result(self) -> CopyResult:
        """Nothing was moved."""
        self._ask("result")
        return CopyResult(num_bytes=0, num_pages=0, duration_ns=0)


@RAISED
@pytest.mark.parametrize("where", ["done", "precede", "result"])
def test_a_pending_copy_is_reported(where: str, raised: BaseException) -> None:
    """Once, as failed if its result cannot be had."""
    copies = AsyncCopies(rank=0)
    copies.start((7,), lambda: Failing(where, raised))
    reports = [*copies.precede([7]), *copies.take_done()]
    assert [(report.job_ids, report.done) for report in reports] == [((7,), where != "result")]


@RAISED
def test_a_copy_engine(make_engine: Any, raised: BaseException) -> None:
    """Copies that cannot begin are reported as failed."""
    engine = small(make_engine)
    side = engine.worker._worker_side
    side._engine = types.SimpleNamespace(
        start_save=raising(raised), start_load=raising(raised), close=side._engine.close
    )
    serve(engine)
    failed = engine.logged(e.SaveFailed)
    assert failed
    assert all(type(raised).__name__ in each.error for each in failed)


@pytest.mark.parametrize("where", ["handler", "hook"])
def test_ctrl_c_ends_the_engine_all_the_same(make_engine: Any, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the process is at that moment."""
    handler: type[StateHandler] = type("Broken", (Running,), {"request_preempted": raising(KeyboardInterrupt())})
    module = types.ModuleType("interrupted_handlers")
    module.__dict__["Broken"] = handler
    monkeypatch.setitem(sys.modules, "interrupted_handlers", module)
    engine = small(make_engine, **({"handlers": ["interrupted_handlers:Broken"]} if where == "handler" else {}))
    if where == "hook":
        monkeypatch.setattr(engine.connector.scheduler_side.request_reader._keys, "keys", raising(KeyboardInterrupt()))
    engine.add_crowd()
    with pytest.raises(KeyboardInterrupt):
        engine.run()


def test_sigterm_ends_a_worker_that_is_in_a_hook() -> None:
    """VLLM's worker ends by the `SystemExit` of its handler and ignores further signals: it must not be caught."""

    @guarded({"load": Fallback()})
    class Side:
        failed: tuple[str, ...] = ()

        def hook_failed(self, hook: str, _request_id: str, _error: BaseException) -> None:
            self.failed = (*self.failed, hook)

        def load(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    def terminate(_signal: int, _frame: object) -> None:
        raise SystemExit

    side = Side()
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        with pytest.raises(SystemExit):
            side.load()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert side.failed == ()


class Stepping:
    """A hook that fails, with steps after it of which one fails, too."""

    def __init__(self) -> None:
        self.called: list[Any] = []

    def hook_failed(self, hook: str, request_id: str, error: BaseException) -> None:
        """Called by the guard."""
        self.called.append((hook, request_id, str(error)))

    def hook(self, request: Any, number: int) -> str:
        """Raises."""
        raise ValueError(f"{request.request_id} {number}")

    def fails(self, *_arguments: Any) -> None:
        """A step that raises."""
        raise ValueError("step")

    def answers(self, _request: Any, number: int) -> int:
        """A step with an answer."""
        return number

    def says_nothing(self, *arguments: Any) -> None:
        """A step without an answer."""
        self.called.append(len(arguments))


@pytest.mark.parametrize(
    ("steps", "answer", "called"),
    [
        ((), "safe", []),
        (("answers", "says_nothing"), 7, [2]),
        (("fails", "says_nothing", "answers"), 7, [("hook", "r", "step"), 2]),
        (("fails",), "safe", [("hook", "r", "step")]),
    ],
)
def test_each_step_after_a_failure_is_called(steps: tuple[str, ...], answer: Any, called: list[Any]) -> None:
    """Also after a step that raises. What a step returns is the answer."""
    side = guarded({"hook": Fallback("safe", steps, fails_as="first part")})(type("Side", (Stepping,), {}))()
    assert side.hook(types.SimpleNamespace(request_id="r"), 7) == answer
    assert side.called == [("first part", "r", "r 7"), *called]


@pytest.mark.parametrize(
    ("connector", "parts", "not_guarded"),
    [
        (KVLedgerConnector, {"scheduler_side": scheduler_side}, {"compare", "bind", "publish"}),
        (
            KVLedgerRecorder,
            {"recording": recording, "worker_recording": worker_recording, "digests": page_digests},
            {"bind", "decline", "call", "take"},
        ),
    ],
    ids=["connector", "recorder"],
)
def test_every_hook_is_in_a_table(connector: type[Any], parts: dict[str, Any], not_guarded: set[str]) -> None:
    """What a connector calls of its parts does not raise, but for what may end vLLM's start and what is wrapped."""
    owners = {"scheduler_side", "_scheduler_side", "recording", "_recorded", "side", "worker_recording", "digests"}
    called = {
        node.func.attr
        for node in ast.walk(ast.parse(Path(inspect.getfile(connector)).read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if ast.unparse(node.func.value).removeprefix("self.") in owners
    }
    hooks = {name for part in parts.values() for name in part.HOOKS}
    assert called - hooks <= not_guarded
    for fallback in scheduler_side.HOOKS.values():
        assert all(callable(getattr(scheduler_side.SchedulerSide, step)) for step in fallback.steps)


ADAPTERS = Path(kvledger.adapters.vllm.__file__).parents[1]
FOLDERS = [ADAPTERS / name for name in ("vllm", "recorder", "recorded")]


SOURCES = [path for folder in FOLDERS for path in sorted(folder.glob("*.py"))]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_hooks_catch_in_one_way(path: Path) -> None:
    """Where a hook goes on whatever is raised, it goes on after a `BaseException`, and asks first whether it may."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ExceptHandler):
            caught = "" if node.type is None else ast.unparse(node.type)
            assert caught not in {"", "Exception"}, f"{path.name}:{node.lineno}: catch BaseException"
            if caught == "BaseException":
                assert ast.unparse(node.body[0]) == f"raise_if_unstoppable({node.name})", f"{path.name}:{node.lineno}"
