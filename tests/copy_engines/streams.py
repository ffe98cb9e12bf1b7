"""A model of CUDA's streams, for machines without a GPU.

It has what CUDA documents of streams and events and no more: what is given to a stream happens after what it was given
before and, after `wait_event`, after what the event was recorded behind. Anything else may happen in any order, and the
test says which of the worst it is.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace


class Event:
    """Behind everything that its stream had been given when it was recorded."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.is_over = False

    def record(self, stream: Stream | None = None) -> None:
        """Become what the stream has come to."""
        self.is_over = False
        (stream or self._device.current).give(self._pass)

    def _pass(self) -> None:
        self.is_over = True

    def query(self) -> bool:
        """Whether the stream has come by."""
        return self.is_over

    def synchronize(self) -> None:
        """Wait for it on the host."""
        self._device.host_waits += 1
        self._device.run_until(lambda: self.is_over)

    def elapsed_time(self, _later: Event) -> float:
        """Milliseconds."""
        return 1.0


class Stream:
    """A queue."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.queue: list[tuple[Event | None, Callable[[], object]]] = []

    def give(self, work: Callable[[], object]) -> None:
        """Work that comes after what was given before."""
        self.queue.append((None, work))

    def wait_event(self, event: Event) -> None:
        """What is given from here on comes after the event."""
        self.queue.append((event, lambda: None))

    def synchronize(self) -> None:
        """Wait for all of it on the host."""
        self._device.host_waits += 1
        self._device.run_until(lambda: not self.queue)

    def step(self) -> bool:
        """Do the first thing of the queue, unless it waits."""
        if not self.queue or (self.queue[0][0] is not None and not self.queue[0][0].is_over):
            return False
        self.queue.pop(0)[1]()
        return True


class Device:
    """Streams, of which those named first do whatever they can before another one does anything."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.forward = self.new_stream()
        self._here = threading.local()
        self.host_waits = 0

    def new_stream(self, *_arguments: object, **_options: object) -> Stream:
        """One more queue."""
        self.streams.append(Stream(self))
        return self.streams[-1]

    @property
    def current(self) -> Stream:
        """The calling thread's; a thread that has chosen none has the forward's."""
        return getattr(self._here, "stream", self.forward)

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Make it current within."""
        before, self._here.stream = self.current, stream
        try:
            yield
        finally:
            self._here.stream = before

    def run_until(self, is_over: Callable[[], bool] = lambda: False, first: Sequence[Stream] = ()) -> None:
        """Let streams go on, those in `first` as far as they can before others move at all."""
        order = [*first, *(stream for stream in self.streams if stream not in first)]
        while not is_over() and any(stream.step() for stream in order):
            pass

    def as_module(self) -> SimpleNamespace:
        """What the engine takes of `torch.cuda`."""
        return SimpleNamespace(
            Stream=self.new_stream,
            Event=lambda **_options: Event(self),
            current_stream=lambda _device=None: self.current,
            device=lambda _device: contextlib.nullcontext(),
            stream=self.on,
        )
