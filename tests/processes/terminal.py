"""What a command writes where it believes to have a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import termios
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from processes import started


def terminal_output(command: Sequence[str | Path], *, columns: int = 80, **options: Any) -> bytes:
    """All of it, with escape sequences, of a command that ends well. `options` are those of `subprocess.Popen`."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    with started(command, stdout=theirs, stderr=subprocess.DEVNULL, **options) as process:
        os.close(theirs)
        shown = b""
        try:
            while part := os.read(ours, 1 << 16):
                shown += part
        except OSError:  # the other end is closed
            pass
        assert process.wait() == 0
    os.close(ours)
    return shown
