"""What a release uploads: a source archive that builds the same wheel, and a wheel whose plugin vLLM finds."""

from __future__ import annotations

import sys
import tarfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

from install.conftest import built, make_environment, succeed

ASK_VLLM = """
import sys
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.plugins import load_general_plugins

load_general_plugins()
asked = KVTransferConfig(kv_connector="KVLedgerConnector", kv_role="kv_both")
found = KVConnectorFactory.get_connector_class(asked)
print(found.__module__, found.__name__, sys.modules[found.__module__].__file__)
"""


def names_in(wheel: Path) -> set[str]:
    """The files of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_source_archive_builds_the_same_wheel(sources: Path, wheel_file: Path, tmp_path: Path) -> None:
    """A file that only the repository has would be missing for those who build from the archive."""
    succeed(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", tmp_path, ".", cwd=sources)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path, filter="data")
    (unpacked,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert names_in(built(unpacked)) == names_in(wheel_file)


def test_vllm_finds_the_plugin_of_the_installed_wheel(wheel_file: Path, tmp_path: Path) -> None:
    """In an environment that has vLLM, kvledger's wheel, and nothing of the repository."""
    python = make_environment(tmp_path, [wheel_file])
    (packages,) = tmp_path.glob("lib/python*/site-packages")
    vllm = find_spec("vllm")
    assert vllm is not None
    assert vllm.origin is not None
    (packages / "with_vllm.pth").write_text(str(Path(vllm.origin).parents[1]))  # comes last, so kvledger is the wheel's
    module, name, origin = succeed(python, "-c", ASK_VLLM, cwd=tmp_path).splitlines()[-1].split()
    assert (module, name) == ("kvledger.adapters.vllm.connector", "KVLedgerConnector")
    assert Path(origin).is_relative_to(packages)
