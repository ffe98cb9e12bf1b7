"""What an import brings along, seen from a fresh interpreter outside the repository."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from processes import finished

from kvledger.adapters.tools.cli.commands import COMMANDS


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `code` as a user would: own process, other folder."""
    return finished([sys.executable, "-c", code], cwd=folder)


def loaded_by(module: str, folder: Path) -> set[str]:
    """The top-level modules that are loaded after `import module`."""
    # A folder without __init__.py could be imported too, and would load nothing: it has no __file__.
    code = f"import sys, {module}\nassert sys.modules['{module}'].__file__\nprint('loaded', *sys.modules)"
    finished = run(code, folder)
    assert finished.returncode == 0, finished.stderr
    (line,) = (line for line in finished.stdout.splitlines() if line.startswith("loaded "))
    return {name.split(".")[0] for name in line.split()[1:]}


def test_no_test_package_hides_an_installed_one() -> None:
    """The folder tests/ comes first on the import path, so a test package named like a library would replace it."""
    tests = Path(__file__).resolve().parents[1]
    packages = {file.parent.name for file in tests.glob("*/__init__.py")}
    taken = sys.stdlib_module_names | packages_distributions().keys() | {"lifecycle", "storage", "adapters"}
    assert not packages & taken


@pytest.mark.parametrize("folder", ["lifecycle", "storage", "adapters"])
def test_the_bare_folder_names_cannot_be_imported(folder: str, tmp_path: Path) -> None:
    """An import that works only inside the repository would fail at the first user's."""
    finished = run(f"import {folder}", tmp_path)
    assert finished.returncode != 0
    assert "ModuleNotFoundError" in finished.stderr


def test_kvledger_itself_loads_nothing_but_the_standard_library(tmp_path: Path) -> None:
    """A program pays for the part that it uses, when it uses it."""
    code = (
        "import sys\nbefore = set(sys.modules)\nimport kvledger\n"
        "print(*(name for name in set(sys.modules) - before if name.partition('.')[0] not in sys.stdlib_module_names))"
    )
    ended = run(code, tmp_path)
    assert (ended.returncode, ended.stdout.split()) == (0, ["kvledger"]), ended.stderr


def test_the_core_loads_neither_torch_nor_vllm(tmp_path: Path) -> None:
    """A log can be folded on a machine that serves no model."""
    assert not loaded_by("kvledger.lifecycle", tmp_path) & {"torch", "vllm", "numpy"}


def test_a_command_is_imported_when_it_is_chosen(tmp_path: Path) -> None:
    """The version and the help of all commands need none of them, and no core."""
    code = (
        "import sys\nfrom kvledger.adapters.tools.cli.commands import COMMANDS\n"
        "from kvledger.adapters.tools.cli.main import main\n"
        "for arguments in (['--version'], ['--help'], ['verify', '--help']):\n"
        "    assert main(arguments) == 0\n"
        "    modules = {'kvledger.lifecycle', *(f'kvledger.adapters.tools.cli.{name}' for name in COMMANDS)}\n"
        "    print('loaded', *sorted(modules & sys.modules.keys()))"
    )
    ended = run(code, tmp_path)
    assert ended.returncode == 0, ended.stderr
    loaded = [line.split()[1:] for line in ended.stdout.splitlines() if line.startswith("loaded")]
    assert loaded == [[], [], ["kvledger.adapters.tools.cli.verify", "kvledger.lifecycle"]]
    assert all(re.search(rf"\n│ {name}\s", ended.stdout) for name in COMMANDS)


# Every module of the connector, because vLLM imports whichever the configuration names.
WHOLE_CONNECTOR = """
import importlib, pkgutil, sys
import kvledger.adapters.vllm as connector
assert connector.__file__
modules = [module.name for module in pkgutil.walk_packages(connector.__path__, connector.__name__ + ".")]
for module in modules:
    importlib.import_module(module)
print("imported", len(modules))
print("compilers", sorted({"numba", "llvmlite", "triton"} & set(sys.modules)))
import torch
print("initialised", torch.cuda.is_initialized())
"""


def test_the_connector_loads_no_compiler_and_touches_no_gpu_before_the_worker_starts(tmp_path: Path) -> None:
    """The CPU worker of vLLM walks every loaded module and dies on numba's; a CUDA context made in the parent cannot be
    used in the workers that are forked from it.
    """
    finished = run(WHOLE_CONNECTOR, tmp_path)
    assert "compilers []" in finished.stdout, finished.stdout + finished.stderr
    assert "initialised False" in finished.stdout, finished.stdout + finished.stderr
    assert "imported 0" not in finished.stdout
