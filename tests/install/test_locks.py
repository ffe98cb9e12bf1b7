"""The locks have a hash for every file, and installing refuses whatever has another one."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from processes import finished

pytestmark = pytest.mark.xdist_group("locks")

REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements"
LOCKS = sorted(set(REQUIREMENTS.glob("*.txt")) - {REQUIREMENTS / "overrides.txt"})
ENTRY = re.compile(r"[a-z0-9][a-z0-9.-]*==[0-9][0-9a-z.!]*(?: ; [^\\\n]+)?((?: \\\n    --hash=sha256:[0-9a-f]{64})+)")

TORCH = "try:\n    import torch_library\nexcept ImportError:\n    raise SystemExit(1)\n"
"""A build of torch that needs a library which the lock leaves out, as the one for CUDA does."""


def entries(lock: str) -> list[str]:
    """What a lock says of each package, without the comments."""
    plain = "".join(line for line in lock.splitlines(keepends=True) if not line.lstrip().startswith("#"))
    return re.split(r"\n(?=\S)", plain.strip())


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.name)
def test_every_package_of_a_lock_has_a_hash(lock: Path) -> None:
    """One version, its hashes, and nothing else: no option and no address, so any package source will do."""
    for entry in entries(lock.read_text()):
        assert ENTRY.fullmatch(entry), entry


def test_every_list_of_packages_has_its_lock() -> None:
    """`make lock` compiles each of them."""
    lists = {path.stem for path in REQUIREMENTS.glob("*.in")} - {"requirements"}
    assert {path.stem for path in LOCKS} == lists | {"lock", "torch-cuda"}


def make_wheel(folder: Path, name: str, code: str, version: str = "1.0") -> str:
    """Write the wheel of a module, and return its SHA-256 hash."""
    information = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": code,
        f"{information}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{information}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = f"{information}/RECORD"
    rows = [f"{path},sha256={digest(text)},{len(text)}\n" for path, text in files.items()]
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as opened:
        for path, text in (files | {record: "".join([*rows, f"{record},,\n"])}).items():
            opened.writestr(path, text)
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


def locked(name: str, *hashes: str) -> str:
    """What a lock says of a package."""
    return f"{name}==1.0" + "".join(f" \\\n    --hash=sha256:{each}" for each in hashes) + "\n    # via sample\n"


def digest(text: str) -> str:
    """As a wheel's RECORD has it."""
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty one with pip, to copy: making one takes longer."""
    folder = tmp_path_factory.mktemp("environment") / ".venv"
    ended = finished((sys.executable, "-m", "venv", folder))
    assert ended.returncode == 0, ended.stderr
    return folder


@pytest.fixture
def packages(tmp_path: Path) -> Mapping[str, str]:
    """Hashes of the packages in a folder, which is a package source."""
    code = {"setuptools": "", "wheel": "", "sample": "", "torch": TORCH, "torch_library": "", "next": ""}
    (tmp_path / "packages").mkdir()
    return {name: make_wheel(tmp_path / "packages", name, text) for name, text in code.items()}


@pytest.fixture
def checkout(tmp_path: Path, environment: Path, packages: Mapping[str, str]) -> Path:
    """The scripts of a checkout, with small locks and no kvledger; .venv has been created and is empty."""
    folder = tmp_path / "checkout"
    (folder / "requirements").mkdir(parents=True)
    shutil.copytree(environment, folder / ".venv", symlinks=True)
    for script in REQUIREMENTS.glob("*.sh"):
        shutil.copy(script, folder / "requirements")
    for name in ("pyproject.toml", "setup.py"):
        (folder / name).touch()
    first = ("setuptools", "wheel", "sample", "torch")
    for lock, names in {"lock": first, "torch-cuda": ("torch_library",), "next": ("next",)}.items():
        (folder / f"requirements/{lock}.txt").write_text("".join(locked(name, packages[name]) for name in names))
    return folder


def run(checkout: Path, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script with the folder of packages, and an index that may be missing, as pip's only sources."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    pip = {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": (checkout.parent / "index").as_uri(),
        "PIP_FIND_LINKS": str(checkout.parent / "packages"),
        "PIP_NO_CACHE_DIR": "1",
    }
    return finished((checkout / "requirements" / script, *arguments), env=inherited | pip)


def installed(folder: Path) -> set[str]:
    """The modules that these wheels brought into an environment."""
    return {path.name.partition("-")[0] for path in folder.glob("lib/python*/site-packages/*-1.0*.dist-info")}


def alter_hash(lock: Path, package: str) -> None:
    """As if the file on the package source were another one than when the lock was made."""
    text = lock.read_text()
    good = re.search(rf"^{package}==1.0 \\\n    --hash=sha256:(\w+)", text, re.MULTILINE)
    assert good
    lock.write_text(text.replace(good[1], hashlib.sha256(b"another file").hexdigest()))


def test_setup_installs_what_has_the_hashes_of_the_locks(checkout: Path) -> None:
    """Also the libraries that torch's CUDA build needs, if the package source has no other build."""
    ended = run(checkout, "install.sh")
    assert installed(checkout / ".venv") == {"setuptools", "wheel", "sample", "torch", "torch_library"}
    assert (checkout / ".venv/stamps/lock").exists(), ended.stdout + ended.stderr


@pytest.fixture
def index_with_torch(checkout: Path, packages: Mapping[str, str]) -> None:
    """The build of torch that needs a library is in an index, which names hashes, and no more in the folder."""
    folder = checkout.parent / "index/torch"
    folder.mkdir(parents=True)
    wheel = (checkout.parent / "packages/torch-1.0-py3-none-any.whl").rename(folder / "torch-1.0-py3-none-any.whl")
    (folder / "index.html").write_text(f'<a href="{wheel.name}#sha256={packages["torch"]}">{wheel.name}</a>\n')


@pytest.mark.usefixtures("index_with_torch")
def test_setup_prefers_the_cpu_build_of_torch(checkout: Path, packages: Mapping[str, str]) -> None:
    """A folder names no hashes, so pip takes the build in the index by itself, as soon as the lock has the hashes of
    both: setup in a fresh clone installed NVIDIA's libraries.
    """
    cpu = make_wheel(checkout.parent / "packages", "torch", "", "1.0+cpu")
    lock = checkout / "requirements/lock.txt"
    before, after = (locked("torch", packages["torch"], *more) for more in ((), (cpu,)))
    lock.write_text(lock.read_text().replace(before, after))
    ended = run(checkout, "install.sh")
    assert (checkout / ".venv/stamps/lock").exists(), ended.stdout + ended.stderr
    assert installed(checkout / ".venv") == {"setuptools", "wheel", "sample", "torch"}


@pytest.mark.usefixtures("index_with_torch")
def test_setup_takes_no_cpu_build_of_torch_with_another_hash(checkout: Path) -> None:
    """It shows the error and takes the build that has a hash in the lock."""
    make_wheel(checkout.parent / "packages", "torch", "", "1.0+cpu")
    ended = run(checkout, "install.sh")
    assert "DO NOT MATCH THE HASHES" in ended.stderr
    assert (checkout / ".venv/stamps/lock").exists(), ended.stdout + ended.stderr
    assert installed(checkout / ".venv") == {"setuptools", "wheel", "sample", "torch", "torch_library"}


@pytest.mark.parametrize(
    ("lock", "package"), [("lock", "setuptools"), ("lock", "sample"), ("torch-cuda", "torch_library")]
)
def test_setup_refuses_a_file_with_another_hash(checkout: Path, lock: str, package: str) -> None:
    """Nothing of it is installed, and a second run does not take the environment for a complete one."""
    alter_hash(checkout / f"requirements/{lock}.txt", package)
    ended = run(checkout, "install.sh")
    assert ended.returncode != 0
    assert "DO NOT MATCH THE HASHES" in ended.stdout
    assert f"requirements/{lock}.txt" in ended.stderr
    assert "make lock" in ended.stderr
    assert package not in installed(checkout / ".venv")
    assert not (checkout / ".venv/stamps/lock").exists()


def test_setup_refuses_a_package_without_a_hash(checkout: Path) -> None:
    """Even one: pip would ask for hashes by itself only if another package had some."""
    lock = checkout / "requirements/lock.txt"
    lock.write_text(re.sub(r" \\\n    --hash=\S+", "", lock.read_text()))
    ended = run(checkout, "install.sh")
    assert ended.returncode != 0
    assert "Hashes are required in --require-hashes mode" in ended.stdout
    assert installed(checkout / ".venv") == set()


def test_an_environment_on_top_takes_no_file_with_another_hash(checkout: Path) -> None:
    """`make lmcache` and `make vllm-next` make theirs so."""
    lock = checkout / "requirements/next.txt"
    good = lock.read_text()
    alter_hash(lock, "next")
    ended = run(checkout, "overlay.sh", "next")
    assert ended.returncode != 0
    assert "DO NOT MATCH THE HASHES" in ended.stderr
    assert installed(checkout / ".venv-next") == set()
    lock.write_text(good)
    ended = run(checkout, "overlay.sh", "next")
    assert ended.returncode == 0, ended.stderr
    assert installed(checkout / ".venv-next") == {"next"}
