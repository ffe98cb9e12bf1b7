"""Started by a test: what hears, and what is left."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from processes import finished, started, wait_until

WAITS = "import time; print('ready', flush=True); time.sleep(1_000_000)"
HAS_A_CHILD = f"""
import subprocess, sys
child = subprocess.Popen(
    [sys.executable, "-c", {WAITS!r}], stdout=subprocess.PIPE, start_new_session="apart" in sys.argv
)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""


@pytest.fixture
def as_in_the_background() -> Iterator[None]:
    """What a shell starts with `&` ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("as_in_the_background")
def test_a_child_hears_an_interrupt_also_where_the_tests_do_not() -> None:
    """With Python's own handler, as if a person had started it."""
    with started([sys.executable, "-c", WAITS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate()
    assert said.endswith("KeyboardInterrupt\n")
    assert process.returncode == -signal.SIGINT


@pytest.mark.parametrize("group", ["same", "apart"])
@pytest.mark.parametrize("failure", [AssertionError, KeyboardInterrupt])
def test_a_test_that_fails_leaves_neither_its_child_nor_the_childs_child(
    failure: type[BaseException], group: str
) -> None:
    """All are killed, whatever the test was doing, also where the child has given its own a group apart."""

    def fail_meanwhile() -> None:
        with started([sys.executable, "-c", HAS_A_CHILD, group], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            pids.extend([process.pid, int(process.stdout.readline())])
            raise failure

    pids: list[int] = []
    with pytest.raises(failure):
        fail_meanwhile()
    assert len(pids) == 2
    wait_until(lambda: not any(runs(pid) for pid in pids))


def runs(pid: int) -> bool:
    """Whether a process is there and is not merely waiting to be taken note of by whoever inherited it."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_what_a_child_said_is_returned() -> None:
    """Exit code, both streams, nothing to read."""
    script = "import sys; print(sys.stdin.read(), 'out'); print('err', file=sys.stderr); sys.exit(3)"
    result = finished([sys.executable, "-c", script])
    assert (result.returncode, result.stdout, result.stderr) == (3, " out\n", "err\n")
