"""State handlers by name: what a connector's configuration and a command line may say instead of code."""

from __future__ import annotations

import importlib
from collections.abc import Iterable

from kvledger.lifecycle import ConfigurationError, HandlerRegistry, StateHandler


def handler_registry(names: Iterable[str]) -> HandlerRegistry:
    """The default handlers, with those named "module:Class" in the places of their states.

    Raises:
        ConfigurationError: a name that cannot be imported or is no state handler.
    """
    registry = HandlerRegistry()
    for name in names:
        module_name, _, class_name = name.partition(":")
        try:
            handler = getattr(importlib.import_module(module_name), class_name)()
        except Exception as error:
            message = f"handlers: {name!r} cannot be imported ({error}); write it as 'module:Class'"
            raise ConfigurationError(message) from error
        if not isinstance(handler, StateHandler):
            message = f"handlers: {name!r} is no kvledger.lifecycle.StateHandler; derive it from one"
            raise ConfigurationError(message)
        registry.replace(handler)
    return registry
