"""What a log may know of an error of somebody's code: never its message, which may quote prompts and salts."""

from __future__ import annotations

import traceback


def without_secrets(error: Exception) -> str:
    """Its class, and the line it comes from."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return type(error).__name__
    last = frames[-1]
    _, _, file_name = last.filename.rpartition("/")
    return f"{type(error).__name__} in {last.name}, {file_name}:{last.lineno}"
