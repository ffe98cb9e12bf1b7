"""Files in the folder for temporary files, which the users of a machine share."""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from pathlib import Path

import pytest
from processes import finished, forked

from kvledger.adapters.lab.simulation import engine
from kvledger.adapters.lab.simulation.tiny_model import tiny_configuration

pytestmark = pytest.mark.scheduler


def test_a_simulated_engine_writes_through_no_link_that_another_user_placed(tmp_path: Path) -> None:
    """Incident: `kvledger-tiny-configuration/config.json.PID` could be a link, and its target was overwritten."""
    victim = tmp_path / "victim"
    victim.write_text("mine")

    def simulate() -> None:
        tiny_configuration.cache_clear()
        tempfile.tempdir = str(tmp_path)
        planted = tmp_path / "kvledger-tiny-configuration"
        planted.mkdir(mode=0o777)
        for name in ("config.json", f"config.json.{os.getpid()}"):
            (planted / name).symlink_to(victim)
        model = Path(engine.vllm_config(num_blocks=8, kv_transfer=None).model_config.model)
        assert stat.S_IMODE(model.stat().st_mode) == 0o700
        assert model.parent == tmp_path

    assert forked(simulate) == 0
    assert victim.read_text() == "mine"


def test_the_folder_of_a_process_is_removed_when_it_ends_and_not_by_its_children(tmp_path: Path) -> None:
    """A forked process uses its parent's."""
    code = (
        "import os, sys\n"
        "from kvledger.adapters.lab.simulation.tiny_model import tiny_configuration\n"
        "folder = tiny_configuration()\n"
        "if not os.fork(): sys.exit()\n"
        "os.wait()\n"
        "assert (folder / 'config.json').exists()\n"
        "print(folder)"
    )
    ended = finished([sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(tmp_path)})
    assert ended.stdout.startswith(str(tmp_path)), ended.stderr
    assert list(tmp_path.iterdir()) == []
