"""A core by names: what a connector's configuration and a command line may say instead of code."""

from __future__ import annotations

import importlib
from collections.abc import Iterable

from kvledger.lifecycle import ConfigurationError, Core, CoreError, StateHandler


def composed_core(handlers: Iterable[str]) -> Core:
    """The standard core, with the handlers named "module:Class" in the places of their states.

    Raises:
        ConfigurationError: a name that cannot be imported or is no state handler, or two of them are for one state.
    """
    try:
        return Core.standard().replacing(*map(_handler, handlers))
    except CoreError as error:
        raise ConfigurationError(f"handlers: {error}") from error


def _handler(name: str) -> StateHandler:
    module_name, _, class_name = name.partition(":")
    try:
        handler = getattr(importlib.import_module(module_name), class_name)()
    except Exception as error:
        message = f"handlers: {name!r} cannot be imported ({error}); write it as 'module:Class'"
        raise ConfigurationError(message) from error
    if not isinstance(handler, StateHandler):
        message = f"handlers: {name!r} is no kvledger.lifecycle.StateHandler; derive it from one"
        raise ConfigurationError(message)
    return handler
