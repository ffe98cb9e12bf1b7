"""The mark `@on(event class, …)`, which names the events that a method handles.

Projections and checkers find their methods by these marks.
"""

from __future__ import annotations

from collections.abc import Callable
from types import UnionType
from typing import Any, TypeVar, get_args

import msgspec

_Method = TypeVar("_Method", bound=Callable[..., None])


def on(*event_classes: type[msgspec.Struct] | UnionType) -> Callable[[_Method], _Method]:
    """Mark a method to be called with each event of these classes, or of the classes in a union.

    A method of an extension's rule may be marked with payload types of the extension's events. Such a method is called
    with the payload.
    """

    def mark(method: _Method) -> _Method:
        vars(method)["event_classes"] = [one for each in event_classes for one in get_args(each) or (each,)]
        return method

    return mark


def marked(owner: object) -> list[tuple[type[Any], Callable[..., Any]]]:
    """Return (event class, method) for all marked methods, in the order of definition. Base classes come first."""
    methods = {
        name: function.event_classes
        for owner_class in reversed(type(owner).__mro__)
        for name, function in vars(owner_class).items()
        if hasattr(function, "event_classes")
    }
    return [(event_class, getattr(owner, name)) for name, classes in methods.items() for event_class in classes]
