"""Nothing of vLLM's base class is answered in the wrapped connector's place, today's or tomorrow's."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import attrs
import pytest
from sim.connectors import NamedConnector, Recorded, Several
from sim.recorded import events_of
from sim.witness import Copied, PlainWitness
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from kvledger.adapters.lab.simulation.connectors import Offloading
from kvledger.adapters.lab.simulation.engine import SimulatedEngine
from kvledger.adapters.recorded.payloads import CHILD
from kvledger.adapters.recorder import KVLedgerRecorder, KVLedgerRecorderHMA
from kvledger.adapters.recorder.forwarding import NOT_FORWARDED, forwards_everything, public_names
from kvledger.adapters.recorder.page_digests import RecordedReports
from kvledger.adapters.recorder.stats import RecordedPromMetrics
from kvledger.lifecycle import events as e

pytestmark = pytest.mark.scheduler

WITNESS = NamedConnector(name="Witness", module="sim.witness")
PLAIN = NamedConnector(name="PlainWitness", module="sim.witness")
NAMES = sorted(set(public_names()) - {"get_kv_connector_stats"})
"""Without the one whose answer is put into an envelope."""
OF_THE_CLASS = {
    name for name in NAMES if isinstance(inspect.getattr_static(KVConnectorBase_V1, name, None), classmethod)
}
OF_VALUES = {name for name in NAMES if isinstance(inspect.getattr_static(KVConnectorBase_V1, name, None), property)}
MAY_MISS = {"request_finished", "request_finished_all_groups"}
"""Either is called, see `test_a_connector_that_takes_groups_is_told_of_groups`."""


class Listener:
    """Takes every call and answers with its name; a property is a name, too."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name in OF_VALUES:
            self.calls.append(name)
            return name

        def answer(*_arguments: Any, **_named: Any) -> Any:
            self.calls.append(name)
            return name

        return answer


@pytest.mark.parametrize("side", ["scheduler", "worker"])
def test_every_public_name_of_the_base_class_reaches_the_wrapped_connector(
    record: Callable[..., tuple[Any, Any]], side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM is installed here; also where the recorder can read nothing of what is given, or record nothing."""
    engine, recording = record(WITNESS)
    connector: Any = engine.scheduler.connector if side == "scheduler" else engine.worker
    listener = Listener()
    monkeypatch.setattr(connector, "wrapped", listener)
    monkeypatch.setattr(connector, "recording", recording)
    for name in set(NAMES) - OF_THE_CLASS:
        if name in OF_VALUES:
            assert getattr(connector, name) == name
            continue
        parameters = inspect.signature(getattr(KVConnectorBase_V1, name, connector.__class__.__dict__.get(name)))
        given = [object() for each in parameters.parameters.values() if each.kind is each.POSITIONAL_OR_KEYWORD][1:]
        answer = getattr(type(connector), name)(connector, *given)
        assert listener.calls[-1] == name or name in MAY_MISS
        answer = answer.wrapped if isinstance(answer, RecordedReports) else answer
        assert answer in {name, None} or name in MAY_MISS
    assert set(NAMES) - OF_THE_CLASS - MAY_MISS <= set(listener.calls)


def test_a_method_that_a_later_vllm_adds_is_forwarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forwarders are made from the base class as it is."""
    monkeypatch.setattr(KVConnectorBase_V1, "of_a_later_version", lambda _self, number: number, raising=False)

    @forwards_everything
    class Later(KVConnectorBase_V1):
        def __init__(self) -> None:
            self.wrapped = Listener()

    assert Later().of_a_later_version(1) == "of_a_later_version"  # type: ignore[attr-defined]


def test_what_is_not_forwarded_the_base_class_answers_for_both_alike(
    record: Callable[..., tuple[Any, Any]],
) -> None:
    """From what it was given itself."""
    engine, _ = record(WITNESS)
    connector: Any = engine.scheduler.connector
    assert {"role", "has_connector_metadata"} == NOT_FORWARDED
    assert connector.role is connector.wrapped.role
    assert connector.has_connector_metadata() is connector.wrapped.has_connector_metadata()


def extra(name: str = "Witness", **options: Any) -> dict[str, Any]:
    """The recorder's extra configuration around a connector of `sim.witness`."""
    inner = {"kv_connector": name, "kv_connector_module_path": "sim.witness", "kv_role": "kv_both"}
    return {"log_dir": None, "connector": {**inner, "kv_connector_extra_config": options}}


@pytest.mark.parametrize("is_piecewise", [False, True])
def test_class_methods_answer_for_the_wrapped_class(record: Callable[..., tuple[Any, Any]], is_piecewise: bool) -> None:
    """VLLM asks before there is an instance, and is to hear what it would without the recorder."""
    recorders = (KVLedgerRecorder, KVLedgerRecorderHMA)
    for recorder in recorders:
        assert recorder.requires_piecewise_for_cudagraph(extra(piecewise=is_piecewise)) is is_piecewise
    engine, _ = record(NamedConnector(name="Witness", module="sim.witness", options={"layout": "HND"}))
    for recorder in recorders:
        assert recorder.get_required_kvcache_layout(engine.vllm_config) == "HND"


def test_a_connector_that_takes_groups_is_told_of_groups(record: Callable[..., tuple[Any, Any]]) -> None:
    """As vLLM would tell it; one that does not is told of its blocks."""
    told: list[str] = []
    before = PlainWitness.on_hook
    PlainWitness.on_hook = staticmethod(told.append)
    try:
        for setup in (
            Recorded(inner=WITNESS),
            Recorded(inner=WITNESS, name="KVLedgerRecorder"),
            Recorded(inner=PLAIN, name="KVLedgerRecorder"),
        ):
            engine, _ = record(setup=setup)
            engine.add("a", range(20), 2)
            engine.run()
    finally:
        PlainWitness.on_hook = before
    ends = [hook for hook in told if hook.startswith("request_finished")]
    assert ends == ["request_finished_all_groups", "request_finished_all_groups", "request_finished"]


def transfer(name: str, **changes: Any) -> KVTransferConfig:
    """What names a recorder."""
    return KVTransferConfig(
        **{
            "kv_connector": name,
            "kv_connector_module_path": "kvledger.adapters.recorder",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra(),
            **changes,
        }
    )


def test_vllm_sees_which_of_the_two_supports_hybrid_memory() -> None:
    """It asks the class."""
    assert KVConnectorFactory.supports_hma_config(transfer("KVLedgerRecorderHMA"))
    assert not KVConnectorFactory.supports_hma_config(transfer("KVLedgerRecorder"))


@attrs.frozen
class Given(Recorded):
    """A recorder whose extra configuration has something else."""

    given: dict[str, Any] = attrs.field(kw_only=True)

    def kv_transfer(self, extra_config: dict[str, Any], kv_transfer: dict[str, Any]) -> dict[str, Any]:
        """With what was given."""
        return {**Recorded.kv_transfer(self, extra_config, kv_transfer), "kv_connector_extra_config": self.given}


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("KVLedgerRecorder", {"log_dir": None}, 'connector: .*"kv_connector": "OffloadingConnector"'),
        ("KVLedgerRecorder", {"log_dir": None, "connector": {}}, 'names no connector to record; write "connector"'),
        (
            "KVLedgerRecorder",
            {**extra(), "log_dirs": "x"},
            "log_dirs: 'x': unknown key; did you mean log_dir",
        ),
        ("KVLedgerRecorder", {"log_dir": None, "connector": {"kv_connector": "Witness", "kv_rol": 1}}, "kv_rol"),
        (
            "KVLedgerRecorderHMA",
            extra("PlainWitness"),
            "PlainWitness': it does not .*; wrap it in KVLedgerRecorder",
        ),
    ],
)
def test_what_cannot_be_recorded_is_refused_by_name(name: str, given: dict[str, Any], message: str) -> None:
    """At start, with the remedy."""
    with pytest.raises(ValueError, match=message):
        SimulatedEngine(num_blocks=20, setup=Given(inner=WITNESS, name=name, given=given))


def called_by_name(vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
    """Has the parameters of a connector; vLLM's factory looks at nothing else."""
    del vllm_config, role, kv_cache_config
    raise KeyboardInterrupt


class NoConnector:
    """A class with these parameters."""

    __init__ = called_by_name  # type: ignore[assignment]


@pytest.mark.parametrize("name", ["called_by_name", "NoConnector"])
def test_what_is_no_class_of_connectors_is_not_called(name: str) -> None:
    """The factory of vLLM returns whatever the module has under the name, and calls it."""
    given = {
        "log_dir": None,
        "connector": {"kv_connector": name, "kv_connector_module_path": __name__, "kv_role": "kv_both"},
    }
    with pytest.raises(ValueError, match=f"connector.kv_connector: '{name}': it is not a class derived from"):
        SimulatedEngine(num_blocks=20, setup=Given(inner=WITNESS, name="KVLedgerRecorder", given=given))


def test_figures_reach_vllms_loggers_as_the_wrapped_connectors_own(record: Callable[..., tuple[Any, Any]]) -> None:
    """From a worker, over the wire, added up with another worker's, and into the class that made them."""
    engine, _ = record(WITNESS)
    figures = engine.worker.get_kv_connector_stats()
    data = figures.to_dict()
    assert data == {"wrapped": "sim.witness:Witness", "figures": Copied({"bytes": 7}).to_dict()}
    made = [KVLedgerRecorder.build_kv_connector_stats(engine.worker.get_kv_connector_stats().to_dict()) for _ in "ab"]
    assert type(made[0].figures) is Copied  # type: ignore[union-attr]
    both = made[0].aggregate(made[1])  # type: ignore[union-attr, arg-type]
    assert both.reduce() == {"bytes": 14}
    assert not both.is_empty()
    both.reset()
    assert both.is_empty()
    assert KVLedgerRecorder.build_kv_connector_stats(None) is None


def test_prometheus_metrics_of_the_wrapped_connector_get_their_own_figures() -> None:
    """Without the envelope."""
    seen: list[Any] = []

    class Metrics:
        def observe(self, data: dict[str, Any], engine_idx: int = 0) -> None:
            seen.append((data, engine_idx))

    metrics: Any = Metrics()
    RecordedPromMetrics(metrics).observe({"wrapped": "x:Y", "figures": {"bytes": 7}}, 2)
    assert seen == [({"bytes": 7}, 2)]


def test_a_recorder_inside_of_multi_connector_says_so_in_its_log(record: Callable[..., tuple[Any, Any]]) -> None:
    """Its rules must know that the workers' reports are of others, too."""
    texts = []
    for setup in (Recorded(inner=WITNESS), Several(children=(Recorded(inner=Offloading()), WITNESS))):
        engine, recording = record(setup=setup)
        engine.add("a", range(20), 2)
        engine.run()
        texts.append([event.text for _, event in events_of(recording) if isinstance(event, e.LogNote)])
    assert [any(text.startswith(CHILD) for text in each) for each in texts] == [False, True]
