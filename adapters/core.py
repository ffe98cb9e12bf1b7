"""A core by names: what a connector's configuration and a command line may say instead of code."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from importlib.metadata import entry_points
from typing import Any

from kvledger.lifecycle import (
    ConfigurationError,
    Core,
    CoreError,
    Extension,
    Refusal,
    StateHandler,
    described,
    raise_if_unstoppable,
)

ENTRY_POINTS = "kvledger.extensions"
"""The group in which a package names its extensions."""
_RECORDER = "kvledger.adapters.recorded.extension:Recorder"
"""Of logs that a recorder has written; no connector loads it by itself."""


def composed_core(handlers: Iterable[str] = (), extensions: Iterable[str] = ()) -> Core:
    """The standard core, with these handlers in the places of their states, and with these extensions.

    Args:
        handlers: as "module:Class".
        extensions: as "module:Class".

    Raises:
        ConfigurationError: a name that cannot be imported or is none of these, or parts that do not fit together.
    """
    replacing = [_made("handlers", name, StateHandler) for name in handlers]
    try:
        core = Core.standard().replacing(*replacing)
    except CoreError as error:
        raise ConfigurationError(f"handlers: {error}") from error
    added = [_made("extensions", name, Extension) for name in extensions]
    try:
        return core.extended(*added)
    except CoreError as error:
        raise ConfigurationError(f"extensions: {error}") from error


def installed_extensions() -> Iterator[str]:
    """Those that installed packages name, as "module:Class"."""
    return (found.value for found in entry_points(group=ENTRY_POINTS))


def available_extensions() -> Iterator[Extension]:
    """Those of them that can be imported, and kvledger's own; for readers, who can do without one."""
    for name in (_RECORDER, *installed_extensions()):
        try:
            yield _made("extensions", name, Extension)
        except ConfigurationError:
            continue


def _made(what: str, name: str, kind: type[Any]) -> Any:  # noqa: ANN401 -- of the kind
    """An instance of the class that is named; nothing is called that is not a class of this kind."""
    module_name, _, class_name = name.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except BaseException as error:
        raise_if_unstoppable(error)
        raise _refused(f"cannot be imported ({described(error)})", "write it as 'module:Class'", what, name) from error
    if not isinstance(found, type):
        raise _refused("is no class", f"name a {kind.__name__} as 'module:Class'", what, name)
    if not issubclass(found, kind):
        raise _refused(f"is no kvledger.lifecycle.{kind.__name__}", "derive it from one", what, name)
    try:
        return found()
    except BaseException as error:
        raise_if_unstoppable(error)
        reason = f"cannot be made ({described(error)})"
        raise _refused(reason, "let it be made without arguments", what, name) from error


def _refused(reason: str, remedy: str, what: str, name: str) -> ConfigurationError:
    return ConfigurationError(Refusal(reason, remedy, what, name))
