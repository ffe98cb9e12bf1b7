"""Ships a log, or all logs of a directory, into a stream: connects, ships, and begins again whenever something breaks.

Its own process, never in the serving path. It reads files that an engine writes and needs nothing from the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from typing import TYPE_CHECKING, Final

import attrs

from kvledger.storage.events.errors import LogError
from kvledger.storage.events.nats.connection import ANSWER_WITHIN_S, Connection, connect
from kvledger.storage.events.nats.errors import StreamUnavailable
from kvledger.storage.events.nats.session import Session
from kvledger.storage.events.nats.shipment import LogProgress
from kvledger.storage.events.nats.stream import NewStream
from kvledger.storage.events.nats.tail import num_bytes_behind
from kvledger.storage.events.segment_file import segment_paths

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvledger.storage.events.nats.address import Access, StreamAddress

__all__ = ["Shipper", "ShippingReport"]

_POLL_S: Final = 0.1
_LOOK_AROUND_S: Final = 1.0
_FIRST_BACK_OFF_S: Final = 0.25
_MAX_BACK_OFF_S: Final = 30.0


@attrs.frozen
class ShippingReport:
    """What came of it: the logs, and how many bytes of theirs are not in the stream."""

    logs: list[LogProgress]
    num_bytes_behind: int

    @property
    def is_damaged(self) -> bool:
        """Whether a log is damaged, forked, or lost events before they were shipped."""
        return any(log.is_damaged or log.lost for log in self.logs)

    @property
    def is_refused(self) -> bool:
        """Whether the server does not take a log: permissions, or a limit of the stream."""
        return any(log.is_refused for log in self.logs)

    @property
    def is_complete(self) -> bool:
        """Whether every log is in the stream up to its end."""
        return self.num_bytes_behind == 0 and not any(log.problem and not log.is_skipped for log in self.logs)


@attrs.define(eq=False)
class Shipper:
    """Ships what is in `path`, a log's directory or a directory of logs. `await run()`; `stop()` from the same loop.

    With `follow` it goes on until it is stopped, and takes up new logs; otherwise it ends when all is shipped, and
    gives up after `give_up_after_s` without progress. `on_remark(log, text)` is told what somebody should know,
    `on_progress` that something was shipped. `stop` lets it ship what is there for up to `grace_s`; a second `stop`
    does not.
    """

    path: Path
    address: StreamAddress
    access: Access
    label: str
    follow: bool = False
    new_stream: NewStream | None = None
    give_up_after_s: float = 60.0
    grace_s: float = 10.0
    answer_within_s: float = ANSWER_WITHIN_S
    on_remark: Callable[[LogProgress | None, str], None] = lambda _log, _text: None
    on_progress: Callable[[], None] = lambda: None
    logs: dict[Path, LogProgress] = attrs.field(factory=dict, init=False)
    _stopping: asyncio.Event = attrs.field(factory=asyncio.Event, init=False)
    _work: asyncio.Task[None] | None = attrs.field(default=None, init=False)
    _progress_at: float = attrs.field(default=0.0, init=False)
    _back_off_s: float = attrs.field(default=_FIRST_BACK_OFF_S, init=False)
    _said: set[str] = attrs.field(factory=set, init=False)

    async def run(self) -> ShippingReport:
        """Ship.

        Raises:
            StreamRefused: credentials, permissions, certificates or the stream are not as they must be.
            StreamUnavailable: gave up.
            LogError: there is no log to ship.

        """
        self._look_around()
        if not self.logs and not self.follow:
            raise LogError(f"{self.path}: holds no log, neither segments (*.kvlog) nor a folder with some")
        self._progress_at = time.monotonic()
        self._work = asyncio.ensure_future(self._keep_shipping())
        stop = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait({self._work, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not self._work.done():
                await asyncio.wait({self._work}, timeout=self.grace_s)
                self._work.cancel()
            await self._finish(self._work)
        finally:
            self._tell()
            stop.cancel()
            self._work.cancel()
        return self.report()

    async def _finish(self, work: asyncio.Task[None]) -> None:
        try:
            await work
        except asyncio.CancelledError:
            if not self._stopping.is_set():
                raise
        except StreamUnavailable as error:
            if not self._stopping.is_set():
                raise
            self.on_remark(None, str(error))

    def stop(self) -> None:
        """Ship what is there, and end."""
        if self._stopping.is_set() and self._work is not None:
            self._work.cancel()
        self._stopping.set()

    def report(self) -> ShippingReport:
        """Say how things are now."""
        self._look_around()
        logs = list(self.logs.values())
        num_bytes = 0
        for log in logs:
            with contextlib.suppress(OSError):
                num_bytes += 0 if log.problem else num_bytes_behind(log.directory, log.last)
        return ShippingReport(logs, num_bytes)

    @property
    def _is_ending(self) -> bool:
        return not self.follow or self._stopping.is_set()

    async def _keep_shipping(self) -> None:
        while True:
            was_stopping = self._stopping.is_set()
            try:
                name = f"kvledger ship {self.label}"
                async with connect(self.address, self.access, name, self.answer_within_s) as connection:
                    await self._ship_over(connection)
                    return
            except StreamUnavailable as error:
                waited_s = time.monotonic() - self._progress_at
                if was_stopping or (not self.follow and waited_s > self.give_up_after_s):
                    raise
                if self._stopping.is_set():
                    continue  # One fresh attempt: what broke may have broken long ago.
                # Not all shippers of a fleet at the same moment.
                pause_s = self._back_off_s * random.uniform(0.5, 1.0)  # noqa: S311
                self._back_off_s = min(_MAX_BACK_OFF_S, self._back_off_s * 2)
                self.on_remark(None, f"{error}; trying again in {pause_s:.1f} s")
                await self._pause(pause_s)

    async def _ship_over(self, connection: Connection) -> None:
        """Ship until all is shipped (and that is all there is to do), or raise."""
        session = await Session.open(connection, self.label, self.new_stream)
        for warning in session.stream.warnings:
            self._say_once(None, warning)
        looked_at = 0.0
        while True:
            is_ending = self._is_ending
            if time.monotonic() - looked_at >= _LOOK_AROUND_S:
                looked_at = time.monotonic()
                self._look_around()
                await session.take_up(self.logs.values())
                session.check_ends(is_final=False)
            has_shipped = await session.ship_round(stand_by=not is_ending)
            if has_shipped:
                self._progress_at = time.monotonic()
                self._back_off_s = _FIRST_BACK_OFF_S
                self.on_progress()
            self._tell()
            if has_shipped:
                continue
            if is_ending:
                self._look_around()
                if await session.take_up(self.logs.values()):
                    continue
                session.check_ends(is_final=True)
                self._tell()
                return
            await self._pause(_POLL_S)

    def _look_around(self) -> None:
        """Take up logs that were not there before."""
        try:
            found = [self.path] if segment_paths(self.path) else sorted(self.path.iterdir())
        except FileNotFoundError:
            return
        except OSError as error:
            self._say_once(None, f"{self.path} cannot be read: {error}")
            return
        for directory in found:
            try:
                if directory not in self.logs and directory.is_dir() and segment_paths(directory):
                    self.logs[directory] = LogProgress(directory)
            except OSError as error:
                self._say_once(None, f"{directory} cannot be read: {error}")

    def _tell(self) -> None:
        for log in self.logs.values():
            for remark in log.remarks:
                self._say_once(log, remark)
            log.remarks.clear()
            if log.problem:
                self._say_once(log, f"not shipped further: {log.problem}")

    def _say_once(self, progress: LogProgress | None, text: str) -> None:
        key = f"{None if progress is None else progress.directory}: {text}"
        if key not in self._said:
            self._said.add(key)
            self.on_remark(progress, text)

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)
