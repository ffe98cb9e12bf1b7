"""Ship a log, or all logs of a directory, to a stream. After each failure, connect and begin again.

A shipper is a process of its own and reads only the log files. The serving process does not wait for the shipper.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import random
import time
from typing import TYPE_CHECKING, Final

import attrs

from kvledger.storage.events.files import directories_in, links_in, refused_link
from kvledger.storage.events.nats.connection import ANSWER_WITHIN_S, Connection, connect
from kvledger.storage.events.nats.errors import StreamUnavailable
from kvledger.storage.events.nats.shipment import LogProgress, Shipment
from kvledger.storage.events.nats.stream import ensure_stream, warnings_about
from kvledger.storage.events.nats.tail import num_bytes_behind
from kvledger.storage.events.segment_file import segment_paths
from kvledger.storage.events.store import LogError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from nats.js.api import StreamConfig

    from kvledger.storage.events.nats.address import Access, StreamAddress

__all__ = ["Shipper", "ShippingReport"]

_POLL_S: Final = 0.1
_LOOK_AROUND_S: Final = 1.0
_FIRST_BACK_OFF_S: Final = 0.25
_MAX_BACK_OFF_S: Final = 30.0


@attrs.frozen
class ShippingReport:
    """The logs, and how many of their bytes are not in the stream. Bytes of logs with a problem are not counted."""

    logs: list[LogProgress]
    num_bytes_behind: int

    @property
    def is_damaged(self) -> bool:
        """Whether a log is damaged or differs from the stream, or lost events before they were shipped."""
        return any(log.problem_kind == "damaged" or log.lost for log in self.logs)

    @property
    def is_refused(self) -> bool:
        """Whether the server refused messages of a log, because of permissions or a size limit."""
        return any(log.problem_kind == "refused" for log in self.logs)

    @property
    def is_complete(self) -> bool:
        """Whether every log is in the stream up to its end, or was skipped."""
        return self.num_bytes_behind == 0 and all(log.problem_kind in {"", "skipped"} for log in self.logs)


@attrs.define(eq=False)
class Shipper:
    """Ships the logs in `path`, a log or a directory of logs. Await `run`. Call `stop` from the same event loop.

    With `follow`, the shipper runs until `stop`, and also ships logs that begin later. Without `follow`, it ends when
    everything is shipped, and gives up after `give_up_after_s` seconds without progress. After `stop`, it ships for up
    to `grace_s` seconds. A second `stop` ends it at once.

    `on_remark(log, text)` gets every message for the user, and no message twice. `on_progress()` is called each time
    something was shipped.
    """

    path: Path
    address: StreamAddress
    access: Access
    label: str
    follow: bool = False
    new_stream: StreamConfig | None = None
    give_up_after_s: float = 60.0
    grace_s: float = 10.0
    answer_within_s: float = ANSWER_WITHIN_S
    on_remark: Callable[[LogProgress | None, str], None] = lambda _log, _text: None
    on_progress: Callable[[], None] = lambda: None
    logs: dict[Path, LogProgress] = attrs.field(factory=dict, init=False)
    _stopping: asyncio.Event = attrs.field(factory=asyncio.Event, init=False)
    _limit: asyncio.Timeout | None = attrs.field(default=None, init=False)
    _progress_at: float = attrs.field(default=0.0, init=False)
    _back_off_s: float = attrs.field(default=_FIRST_BACK_OFF_S, init=False)
    _remarked: set[tuple[Path | None, str]] = attrs.field(factory=set, init=False)

    async def run(self) -> ShippingReport:
        """Ship the logs, and return the report.

        Raises:
            StreamRefused: credentials, permissions, certificates or the stream's settings do not allow shipping.
            StreamUnavailable: the shipper gave up after failed attempts.
            LogError: there is no log to ship.
        """
        self._find_logs()
        if not self.logs and not self.follow:
            raise LogError(f"{self.path}: holds no log: neither segments (*.kvlog) nor a directory with segments")
        self._progress_at = time.monotonic()
        try:
            async with asyncio.timeout(None) as self._limit:
                await self._keep_shipping()
        except TimeoutError:
            if self._limit is None or not self._limit.expired():
                raise
            # The grace period is over. The report states how many bytes were not shipped.
        except StreamUnavailable as error:
            if not self._stopping.is_set():
                raise
            self._remark(None, str(error))
        return self.report()

    def stop(self) -> None:
        """Ship the rest for up to `grace_s` seconds, then end `run`. A second call ends it at once."""
        grace_s = 0.0 if self._stopping.is_set() else self.grace_s
        self._stopping.set()
        if self._limit is not None:
            with contextlib.suppress(RuntimeError):  # the run has ended
                self._limit.reschedule(asyncio.get_running_loop().time() + grace_s)

    def report(self) -> ShippingReport:
        """Return the current state."""
        self._find_logs()
        num_bytes = 0
        for log in self.logs.values():
            with contextlib.suppress(OSError):
                num_bytes += 0 if log.problem else num_bytes_behind(log.directory, log.last)
        return ShippingReport(list(self.logs.values()), num_bytes)

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
                    continue  # Try once more: the connection may have broken long ago.
                # The shippers of a fleet must not retry at the same moment.
                pause_s = self._back_off_s * random.uniform(0.5, 1.0)  # noqa: S311
                self._back_off_s = min(_MAX_BACK_OFF_S, self._back_off_s * 2)
                self._remark(None, f"{error}; trying again in {pause_s:.1f} s")
                await self._pause(pause_s)

    async def _ship_over(self, connection: Connection) -> None:
        """Ship over one connection. Return when everything is shipped and the shipper must end."""
        configuration = await ensure_stream(connection, self.new_stream)
        for warning in warnings_about(configuration):
            self._remark(None, warning)
        shipments: dict[Path, Shipment] = {}
        looked_at = -math.inf
        while True:
            is_ending = not self.follow or self._stopping.is_set()
            if time.monotonic() - looked_at >= _LOOK_AROUND_S:
                looked_at = time.monotonic()
                await self._start_new(shipments, connection, configuration)
                for shipment in shipments.values():
                    shipment.check_end(is_final=False)
            if await self._ship_round(shipments.values(), stand_by=not is_ending):
                continue
            if not is_ending:
                await self._pause(_POLL_S)
            elif not await self._start_new(shipments, connection, configuration):
                for shipment in shipments.values():
                    shipment.check_end(is_final=True)
                return

    async def _ship_round(self, shipments: Iterable[Shipment], *, stand_by: bool) -> bool:
        """Ship one batch of each log. Return whether there was anything to ship.

        With `stand_by`, leave out logs that another shipper ships.
        """
        has_shipped = False
        for shipment in shipments:
            if not stand_by or time.monotonic() >= shipment.resume_at:
                has_shipped |= await shipment.advance()
        if has_shipped:
            self._progress_at, self._back_off_s = time.monotonic(), _FIRST_BACK_OFF_S
            self.on_progress()
        return has_shipped

    async def _start_new(
        self, shipments: dict[Path, Shipment], connection: Connection, configuration: StreamConfig
    ) -> bool:
        """Start to ship new logs. Start a log again if its `retry_at` is reached. Return whether any log is new."""
        self._find_logs()
        new = self.logs.keys() - shipments.keys()
        for directory, log in self.logs.items():
            if directory in new:
                remark = functools.partial(self._remark, log)
                shipments[directory] = Shipment(connection, configuration, self.label, log, remark)
            if directory in new or time.monotonic() >= shipments[directory].retry_at:
                await shipments[directory].start()
        return bool(new)

    def _find_logs(self) -> None:
        try:
            found = [self.path] if segment_paths(self.path) else directories_in(self.path)
            links = [] if found == [self.path] else links_in(self.path)
        except FileNotFoundError:
            return
        except OSError as error:
            self._remark(None, f"{self.path} cannot be read: {error}")
            return
        for link in links:
            self._remark(None, f"{refused_link(link)}; logs at the link's target are not shipped")
        for directory in found:
            try:
                if directory not in self.logs and segment_paths(directory):
                    self.logs[directory] = LogProgress(directory)
            except OSError as error:
                self._remark(None, f"{directory} cannot be read: {error}")

    def _remark(self, log: LogProgress | None, text: str) -> None:
        key = (None if log is None else log.directory, text)
        if key not in self._remarked:
            self._remarked.add(key)
            self.on_remark(log, text)

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)
