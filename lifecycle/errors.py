"""Errors of foreign code: which errors kvledger catches, and which parts of an error a log may contain.

Foreign code (a handler, an extension, vLLM's request object, a copy engine) may raise any exception. Where kvledger
runs such code and has to go on, it catches `BaseException` and calls `raise_if_unstoppable` first:

    except BaseException as error:
        raise_if_unstoppable(error)
        ...  # record it, and go on
"""

from __future__ import annotations

import signal
import traceback
from functools import partial
from types import CodeType, FunctionType, MethodType


class Unstoppable(BaseException):
    """Base of kvledger's own exceptions that are not errors of foreign code. Foreign code must not catch them."""


def raise_if_unstoppable(error: BaseException) -> None:
    """Raise `error` again if it must end the process or the command; return if kvledger may go on.

    It raises `KeyboardInterrupt` and `Unstoppable`. It also raises an error that a signal handler raised, unless the
    error is an `Exception`. vLLM's workers end by such an error: their SIGTERM handler raises `SystemExit`
    (`vllm/v1/executor/multiproc_executor.py`, worker_main, 0.32). This function does not raise any other error, such
    as a `SystemExit` that the foreign code itself raised.
    """
    if isinstance(error, Exception):
        return
    if isinstance(error, KeyboardInterrupt | Unstoppable) or _is_of_signal_handler(error):
        raise error


class suppressed:  # noqa: N801 -- used as `contextlib.suppress` is
    """Suppresses what a `with` block of foreign code raises, except what `raise_if_unstoppable` raises again."""

    def __enter__(self) -> None:
        """Begin the block."""

    def __exit__(self, _kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> bool:
        """Suppress the block's error, unless `raise_if_unstoppable` raises it again."""
        if error is not None:
            raise_if_unstoppable(error)
        return True


def _is_of_signal_handler(error: BaseException) -> bool:
    """Whether a function that is installed as a signal handler raised the error, directly or in a function it called.

    The function is not recognised if it installs another signal handler before it raises.
    """
    handlers = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    return any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__))


def _code_of(handler: object) -> CodeType | None:
    """Return the code that Python runs when it calls a signal handler; None if the handler is not written in Python."""
    while isinstance(handler, partial | MethodType):
        handler = handler.func if isinstance(handler, partial) else handler.__func__
    if not isinstance(handler, FunctionType):  # a callable object
        handler = getattr(type(handler), "__call__", None)  # noqa: B004 -- the function is asked for
    return handler.__code__ if isinstance(handler, FunctionType) else None


def described(error: BaseException) -> str:
    """Return the error's class and message for people. If reading the message raises, return only the class."""
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException as again:  # noqa: BLE001 -- its class is somebody else's code, too
        raise_if_unstoppable(again)
        return type(error).__name__


class QuotesNothing(Exception):
    """Base of kvledger's own errors whose messages quote nothing of a request. A log may contain these messages."""


_OWN_FOLDER = __file__.rpartition("/")[0] + "/"
_MAX_MESSAGE = 200
"""Largest number of characters of an error message that a log contains."""


def without_secrets(error: BaseException, *, of_extension: bool = False) -> str:
    """Return the error's class, and the line that raised the error. For a `QuotesNothing`, add its message.

    Messages of other errors are left out, because they may quote prompts and salts.

    Args:
        error: what was raised.
        of_extension: whether an extension's code raised. If so, the line is the innermost one outside of
            `kvledger.lifecycle`, which is a line of the extension.
    """
    own = error.args if isinstance(error, QuotesNothing) else ()
    message = "".join(f": {text[:_MAX_MESSAGE]}" for text in own[:1] if type(text) is str)
    frames = list(traceback.extract_tb(error.__traceback__))
    if of_extension:
        frames = [frame for frame in frames if not frame.filename.startswith(_OWN_FOLDER)] or frames
    if not frames:
        return f"{type(error).__name__}{message}"
    last = frames[-1]
    _, _, file_name = last.filename.rpartition("/")
    return f"{type(error).__name__} in {last.name}, {file_name}:{last.lineno}{message}"
