"""Errors of somebody else's code: which of them kvledger catches, and what a log may know of one.

Somebody else's code (a handler, an extension, a request of vLLM's, a copy engine) may raise anything. Where kvledger
runs such code and has to go on, it catches `BaseException` and calls `raise_if_unstoppable` first:

    except BaseException as error:
        raise_if_unstoppable(error)
        ...  # record it, and go on
"""

from __future__ import annotations

import inspect
import traceback
import types
from collections.abc import Sequence


class Unstoppable(BaseException):
    """Base of kvledger's own exceptions that no code between `raise` and their handler may stop."""


def raise_if_unstoppable(error: BaseException) -> None:
    """Raise `error` again if it has to end the process or the command; return if kvledger may go on without it.

    These pass: `KeyboardInterrupt`, `Unstoppable`, and what a signal handler raised while other code ran. vLLM's
    workers end by a `SystemExit` that their handler of SIGTERM raises (`vllm/v1/executor/multiproc_executor.py`,
    worker_main, 0.32). A `SystemExit` of the code itself does not pass, and neither does any other exception.
    """
    if isinstance(error, Exception):
        return
    if isinstance(error, KeyboardInterrupt | Unstoppable) or _is_of_signal_handler(error):
        raise error


class suppressed:  # noqa: N801 -- used as `contextlib.suppress` is
    """Goes on behind a `with` block of somebody else's code, whatever that raises; see `raise_if_unstoppable`."""

    def __enter__(self) -> None:
        """Begin the block."""

    def __exit__(self, _kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> bool:
        """Forget the error if kvledger may go on without it."""
        if error is not None:
            raise_if_unstoppable(error)
        return True


def _is_of_signal_handler(error: BaseException) -> bool:
    """Whether a frame of its traceback got the frame that it interrupted as an argument, as signal handlers do."""
    interrupted = None
    step = error.__traceback__
    while step is not None:
        if interrupted is not None:
            # Only arguments: code that looks at its caller has the caller's frame in a variable.
            for value in map(step.tb_frame.f_locals.get, _arguments_of(step.tb_frame.f_code)):
                if value is interrupted or (type(value) is tuple and any(each is interrupted for each in value)):
                    return True
        interrupted, step = step.tb_frame, step.tb_next
    return False


def _arguments_of(code: types.CodeType) -> Sequence[str]:
    num_starred = sum(bool(code.co_flags & flag) for flag in (inspect.CO_VARARGS, inspect.CO_VARKEYWORDS))
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + num_starred]


def described(error: BaseException) -> str:
    """Its class and its message, for people; the class alone if the message cannot be had."""
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException as again:  # noqa: BLE001 -- its class is somebody else's code, too
        raise_if_unstoppable(again)
        return type(error).__name__


def without_secrets(error: BaseException) -> str:
    """Its class, and the line it comes from; never its message, which may quote prompts and salts."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return type(error).__name__
    last = frames[-1]
    _, _, file_name = last.filename.rpartition("/")
    return f"{type(error).__name__} in {last.name}, {file_name}:{last.lineno}"
