"""Forwards everything in vLLM's base class of connectors to the wrapped connector.

The forwarders are generated from the installed version's class, so methods that later versions add are forwarded, too.
A method that is defined in `connector.py` takes precedence. This module must not know what any method means.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

from kvledger.adapters.recorder.wrapped import unwrapped
from kvledger.adapters.vllm.messages import refusals_are_said

NOT_FORWARDED = frozenset({"role", "has_connector_metadata"})
"""Names that are not forwarded. For these, vLLM's base class gives the same answer as the wrapped connector."""


def public_names() -> Iterator[str]:
    """Yield the names that the recorder forwards: public names in vLLM's base classes of connectors."""
    for base in (KVConnectorBase_V1, SupportsHMA):
        yield from (name for name in vars(base) if not name.startswith("_") and name not in NOT_FORWARDED)


def forwards_everything(recorder: type[Any]) -> type[Any]:
    """Class decorator: add a forwarder for each public name that the decorated class does not define."""
    for name in public_names():
        if name in vars(recorder):
            continue
        declared = inspect.getattr_static(KVConnectorBase_V1, name, None)
        if declared is None:
            continue  # only in `SupportsHMA`; `KVLedgerRecorderHMA` defines it
        if isinstance(declared, property):
            setattr(recorder, name, _forwarded_property(name))
        elif isinstance(declared, classmethod):
            setattr(recorder, name, _forwarded_class_method(name, declared))
        elif callable(declared):
            setattr(recorder, name, _forwarded_method(name, declared))
    recorder.__abstractmethods__ = frozenset()
    return recorder


def _forwarded_method(name: str, declared: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(declared)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        recording = vars(self).get("worker_recording")
        hook = getattr(self.wrapped, name)
        return hook(*args, **kwargs) if recording is None else recording.call(name, hook, args, kwargs)

    return forward


def _forwarded_property(name: str) -> property:
    return property(lambda self: getattr(self.wrapped, name))


def _forwarded_class_method(name: str, declared: classmethod[Any, Any, Any]) -> classmethod[Any, Any, Any]:
    @functools.wraps(declared.__func__)
    @refusals_are_said()
    def forward(cls: type[Any], *args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        found = [unwrapped(argument) for argument in given]
        wrapped = next((each[0] for each in found if each is not None), None)
        if wrapped is None:  # no argument names a connector
            return declared.__func__(cls, *args, **kwargs)
        seen = [argument if each is None else each[1] for argument, each in zip(given, found, strict=True)]
        return getattr(wrapped, name)(*seen[: len(args)], **dict(zip(kwargs, seen[len(args) :], strict=True)))

    return classmethod(forward)
