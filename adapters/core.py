"""Builds a core from the handlers and extensions that a configuration or a command line names."""

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
"""Entry point group in which a package names its extensions."""
_RECORDER = "kvledger.adapters.recorded.extension:Recorder"
"""The extension for logs that a recorder has written. No connector loads it automatically."""


def composed_core(handlers: Iterable[str] = (), extensions: Iterable[str] = ()) -> Core:
    """Return the standard core with these extensions and handlers, named as "module:Class".

    Each handler replaces the standard handler of the same state.

    Raises:
        ConfigurationError: a name cannot be imported or is no handler or extension, or the parts do not fit together.
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
    """Return the names of the extensions of installed packages, as "module:Class"."""
    return (found.value for found in entry_points(group=ENTRY_POINTS))


def available_extensions() -> Iterator[Extension]:
    """Yield kvledger's own extension, and the installed extensions that can be imported. Readers of logs use them."""
    for name in (_RECORDER, *installed_extensions()):
        try:
            yield _made("extensions", name, Extension)
        except ConfigurationError:
            continue


def _made(what: str, name: str, kind: type[Any]) -> Any:  # noqa: ANN401 -- of the kind
    """Return an instance of the named class, which must be derived from `kind`."""
    module_name, _, class_name = name.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except BaseException as error:
        raise_if_unstoppable(error)
        raise _refused(f"cannot be imported ({described(error)})", "write it as 'module:Class'", what, name) from error
    if not isinstance(found, type):
        raise _refused("is not a class", f"name a {kind.__name__} as 'module:Class'", what, name)
    if not issubclass(found, kind):
        raise _refused(f"is not a kvledger.lifecycle.{kind.__name__}", "derive it from that class", what, name)
    try:
        return found()
    except BaseException as error:
        raise_if_unstoppable(error)
        reason = f"cannot be created ({described(error)})"
        raise _refused(reason, "make its constructor work without arguments", what, name) from error


def _refused(reason: str, remedy: str, what: str, name: str) -> ConfigurationError:
    return ConfigurationError(Refusal(reason, remedy, what, name))
