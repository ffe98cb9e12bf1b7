"""Write what simulated engines logged, kvledger's and recorders', into one file; run as a process of its own."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import msgspec
from sim.connectors import NamedConnector, Recorded, Several
from sim.faults import CLIENT_FAULTS
from sim.settings import draw
from sim.world import World

from kvledger.adapters.lab.simulation.connectors import ConnectorSetup, Offloading

WITHIN = {"load_mode": "sync", "save_mode": "sync", "max_silent_ms": 0, "digests": "off"}
NEIGHBOUR = NamedConnector(
    name="Neighbour", module="sim.neighbour", options={"num_tokens": 48, "num_steps": 2, "seed": 1}
)
INNER: dict[str, ConnectorSetup] = {
    "OffloadingConnector": Offloading(),
    "MultiConnector": Several(children=(NEIGHBOUR, Offloading())),
}
MAX_FRAMES = 150


def log_of(name: str, log: Any) -> list[Any]:
    """Name, header, the first frames, and a request; as msgpack."""
    store = log.store
    header = getattr(store, "header", None) or store._store.header
    frames = [msgspec.msgpack.decode(frame.payload) for frame in store.read()][:MAX_FRAMES]
    texts = [text for frame in frames for event in frame for text in event[1:2] if isinstance(text, str)]
    return [name, {key: value for key, value in header.items() if key != "log_id"}, frames, texts[0]]


def main() -> None:
    """Live through some worlds."""
    found = []
    for seed in (3, 5):
        with World(seed) as world:
            world.run()
            found.append(log_of(f"world {seed}", world.side.log))
    for name, inner in INNER.items():
        recorder = Recorded(inner=inner)
        connector = {**draw(random.Random("settings 3")).connector, **WITHIN}
        with World(3, setup=recorder, neighbour=recorder, faults=CLIENT_FAULTS, connector=connector) as world:
            world.run()
            found.append(log_of(f"recorded {name}", world.engine.scheduler.connector.recording.log.log))
    Path(sys.argv[1]).write_bytes(msgspec.msgpack.encode(found))


if __name__ == "__main__":
    main()
