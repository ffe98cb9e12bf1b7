"""Opens a log, decodes its frames into events, and records damage and missing events."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import attrs

from kvledger.adapters.core import available_extensions
from kvledger.adapters.figures import Totals
from kvledger.adapters.tools.exit_codes import CommandFailed, ExitCode, unreadable_text
from kvledger.adapters.units import plural
from kvledger.lifecycle import Core, CoreError, LedgerConfiguration, Projections, SequencedEvent
from kvledger.lifecycle.audit import Start, StartFolds
from kvledger.lifecycle.codec import CodecError, DecodedFrame, EventDecoder, SchemaTooNew, vocabulary_header
from kvledger.lifecycle.events import Event, ExtensionEvent
from kvledger.lifecycle.ranges import MAX_INT64, MAX_NS
from kvledger.lifecycle.reader import NotResumable
from kvledger.lifecycle.snapshots import SnapshotError, state_fingerprint
from kvledger.lifecycle.untrusted import Undecodable, converted, from_msgpack
from kvledger.storage.events import (
    Damage,
    Frame,
    FrameKind,
    HowEnded,
    LogEnding,
    LogError,
    LogReader,
    Retirement,
    find_snapshot,
    is_being_written,
    judge_ending,
    read_ending,
    read_log,
)
from kvledger.storage.events.files import refused_link
from kvledger.storage.events.frames import frame_bytes, next_chain_hash
from kvledger.storage.events.reader import frames_from
from kvledger.storage.events.segment_bytes import num_written_bytes
from kvledger.storage.events.segment_file import segment_paths

BytesRead = Callable[[int], None]
Place = tuple[str, int]
"""Name of a segment, and an offset in that segment."""
_NOT_READ = LogEnding(HowEnded.UNKNOWN, "the log was not read to its end")
_NOT_ALL = LogEnding(HowEnded.UNKNOWN, "one segment alone was read")


@attrs.frozen
class Gap:
    """Events that are not in the log, or cannot be read."""

    first_sequence: int
    last_sequence: int
    is_in_snapshot: bool = False
    """Whether the state from which folding begins contains the effects of the missing events."""

    @property
    def is_beginning(self) -> bool:
        """Whether the log's oldest events are missing, for example because they were retired."""
        return self.first_sequence == 1

    def __str__(self) -> str:
        return f"events {self.first_sequence}–{self.last_sequence} are missing; later events are described without them"


@attrs.define
class Batch:
    """The events of one frame, and the place of the frame in the log."""

    first_sequence: int
    decoded: DecodedFrame
    segment: str
    offset: int
    end_offset: int
    chain_hash: bytes
    """Chain hash of the frame."""
    gap: Gap | None = None
    """Events that are missing just before the batch; None if there are none, or if `batches_from` read the batch."""

    @property
    def events(self) -> Sequence[Event]:
        """The events of the frame, without their sequence numbers."""
        return self.decoded.events

    @property
    def last_sequence(self) -> int:
        """Sequence number of the frame's last event."""
        return self.first_sequence + self.decoded.num_events - 1

    def up_to(self, sequence: int) -> Batch:
        """Return the same batch without the events after `sequence`."""
        events = [event for at, event in self.numbered() if at <= sequence]
        skipped = tuple(place for place in self.decoded.skipped if self.first_sequence + place <= sequence)
        return attrs.evolve(self, decoded=DecodedFrame(events, skipped))

    def numbered(self) -> Iterator[SequencedEvent]:
        """Yield the events with their sequence numbers."""
        return self.decoded.numbered(self.first_sequence)

    def timed(self) -> Iterator[tuple[int, Event, int]]:
        """Yield (sequence number, event, time). Times are nanoseconds since the log was opened.

        A decision gets the time of its observation, which is before the decision in the frame.
        """
        times = (getattr(event, "time_ns", None) for event in self.events)
        time_ns: int = next((time for time in times if time is not None), 0)
        for sequence, event in self.numbered():
            time_ns = getattr(event, "time_ns", time_ns)
            yield sequence, event, time_ns


@attrs.define
class StoredLog:
    """An opened log. Each reading of its events first resets `damage` and the counters, and then fills them."""

    path: Path
    core: Core
    header: Mapping[str, object]
    """Key → value; empty if no copy of the header is intact. Events are then decoded in the format of this version."""
    _configuration: LedgerConfiguration | None
    trusts_snapshots: bool = attrs.field(default=False, kw_only=True)
    """Whether snapshots that other code made can be used."""
    damage: list[Damage] = attrs.field(factory=list, init=False)
    """Damage that the event store reports, and three more kinds of damage.

    - `lost_events`: the log records that its writer could not write some events.
    - `undecodable`: an intact frame does not match the header, or an extension cannot decode the payload of its event.
    - `miscounted`: a frame does not contain as many events as it declares.
    """
    num_bytes: int = attrs.field(default=0, init=False)
    num_frames: int = attrs.field(default=0, init=False)
    num_events: int = attrs.field(default=0, init=False)
    first_sequence: int = attrs.field(default=0, init=False)
    last_sequence: int = attrs.field(default=0, init=False)
    trusted_sequence: int = attrs.field(default=0, init=False)
    """Sequence number of the last event before the first gap. Gaps up to `start_sequence` do not count."""
    start_sequence: int = attrs.field(default=0, init=False)
    """Sequence number after which folding begins, see `start`; 0: folding begins at the log's first event."""
    start_remarks: list[str] = attrs.field(factory=list, init=False)
    """Why snapshots were not used."""
    start_totals: bytes = attrs.field(default=b"", init=False)
    """Encoded totals of the snapshot from which folding begins; empty if the snapshot has none, or is not used."""
    ending: LogEnding = attrs.field(default=_NOT_READ, init=False)
    """How the log ended. Known after the log was read to its end."""
    last_events: Sequence[SequencedEvent] = attrs.field(default=(), init=False)
    """Events of the last frame that was read."""
    on_bytes: BytesRead | None = attrs.field(default=None, init=False)
    """Called with the number of bytes of each frame, to show progress."""
    _decoder: EventDecoder = attrs.field(alias="decoder")
    _reader: LogReader = attrs.field(alias="reader")
    _was_open: bool = attrs.field(init=False)
    """Whether the log was being written when reading began. Events that were appended later may not have been read."""

    def start(self, *, newest: bool = False) -> Start | None:
        """Return the state from which to fold the log; None: no snapshot is needed, or none is usable.

        If the oldest segments were retired, the state comes from the earliest usable snapshot. A usable snapshot
        belongs to this log and has the present format of the state. Unless `trusts_snapshots` is true, the snapshot
        must also have been made by this code. After this call, `is_trusted` says for each batch that is read
        whether it can be folded.

        Args:
            newest: use the newest usable snapshot, even if the log has its beginning.
        """
        self.start_sequence, self.start_remarks, self.start_totals = 0, [], b""
        has_beginning = self._reader.first_sequence in {None, 1}
        if not self.header or not self.path.is_dir() or (has_beginning and not newest):
            return None
        other_code = self.core.other_code(self.header)
        if other_code and not self.trusts_snapshots:
            self.start_remarks.append(
                f"the log's snapshots were made by other code than this ({other_code}); "
                "give --trust-snapshots to begin at one anyway"
            )
            return None
        fingerprint = state_fingerprint(self.core, self.configuration)
        log_id = str(self.header["log_id"])
        found, self.start_remarks = find_snapshot(self.path, log_id=log_id, fingerprint=fingerprint, newest=newest)
        if found is None:
            return None
        start = Start(found.state, found.reader, trusts_other_code=self.trusts_snapshots)
        try:
            StartFolds(self.core, self.configuration, start)
        except (SnapshotError, NotResumable) as error:
            self.start_remarks.append(str(error))
            return None
        self.start_sequence, self.start_totals = found.sequence, found.totals
        return start

    def totals(self, projections: Projections) -> Totals:
        """Return totals of the events that `projections` will fold. Call this after `start`, before the first fold.

        The totals are incomplete if folding begins at a snapshot without totals.
        """
        return Totals.continued(projections, self.start_totals) if self.start_sequence else Totals(projections)

    @property
    def configuration(self) -> LedgerConfiguration:
        """Sizes and choices of the engine that wrote the log, needed to fold its events.

        Raises:
            CommandFailed: no copy of the header, which has the configuration, is intact.
        """
        if self._configuration is None:
            raise CommandFailed(
                f"{self.path}: no copy of the log's header, which has the configuration, is intact, so states, "
                "reasons and decisions cannot be shown; `kvledger verify` and `kvledger show` (without a request) show "
                "the rest",
                ExitCode.DAMAGED,
            )
        return self._configuration

    @property
    def worker_rank(self) -> int | None:
        """Rank of the worker that wrote the log; None if the scheduler did."""
        rank = self.header.get("worker_rank")
        return rank if isinstance(rank, int) else None

    @property
    def num_device_blocks(self) -> int:
        """Blocks of vLLM's KV cache that requests can hold; 0 if the header does not have the number."""
        number = self.header.get("num_device_blocks")
        return number if isinstance(number, int) and number > 0 else 0

    @property
    def written_by(self) -> str:
        """Text with the versions of kvledger and vLLM, and with the recorded connector and the worker, if any."""
        header, rank = self.header, self.worker_rank
        text = f"kvledger {header.get('kvledger_version', 'unknown')}, vLLM {header.get('vllm_version', 'unknown')}"
        recorded = f", recording {header['connector']}" if header.get("connector") else ""
        return text + recorded + ("" if rank is None else f", worker {rank} of engine {header.get('engine_id')}")

    @property
    def decides_elsewhere(self) -> bool:
        """Whether another connector saves and loads, so that the log has no saves and loads of kvledger."""
        return any(extension.declaration().replaces for extension in self.core.extensions)

    @property
    def other_code_remarks(self) -> list[str]:
        """One remark if other code wrote the log, because this code may decide differently in a replay; else empty."""
        other = self.core.other_code(self.header) if self.header else ""
        return [f"the log was written by other code ({other}), which can cause divergences"] if other else []

    @property
    def skipped(self) -> Mapping[str, int]:
        """Event id → number of events that were skipped because this version does not know them; see `open_log`."""
        return self._decoder.num_skipped

    @property
    def begins_late(self) -> bool:
        """Whether event 1 was not read, for example because the oldest segments were retired."""
        return self.first_sequence > 1

    @property
    def retired(self) -> Sequence[Retirement]:
        """Segments that the log records as retired. They do not count as damage. Known after the log was read."""
        return self._reader.retired

    @property
    def head_hash(self) -> str:
        """Chain hash (hex) of the last frame that was read. Keep it to check later whether the log was rewritten."""
        return "" if self._reader.head_hash is None else self._reader.head_hash.hex()

    @_was_open.default
    def _look_for_writer(self) -> bool:
        return is_being_written(self.path)

    def judge_ending(self, last_sequence: int, head_hash: str) -> LogEnding:
        """Judge how the log ended, from the last event that was read and the chain hash of its frame.

        `head_hash` is in hexadecimal; empty: unknown.
        """
        if not self.path.is_dir():
            self.ending = _NOT_ALL
        else:
            log_id, head = self.header.get("log_id"), bytes.fromhex(head_hash) or None
            self.ending = judge_ending(self.path, log_id, last_sequence + 1, head, was_open=self._was_open)
        return self.ending

    def has_ended(self) -> bool:
        """Whether the log's end record shows that the log will not grow. False for a copy or mirror, which may grow."""
        if is_being_written(self.path):
            return False
        ending = judge_ending(self.path, self.header.get("log_id"), 0, None, was_open=False)
        return ending.how is not HowEnded.UNKNOWN

    def look_at_end(self) -> LogEnding:
        """Judge how the log ended, reading only its last segment."""
        self.ending = read_ending(self.path) if self.path.is_dir() else _NOT_ALL
        return self.ending

    def files(self) -> list[Path]:
        """Return the log's present segments, in order."""
        return segment_paths(self.path) if self.path.is_dir() else [self.path]

    def has_more_than(self, segment: str, offset: int) -> bool:
        """Whether the log has bytes after this offset of this segment."""
        last = self.files()[-1]
        return last.name > segment or num_written_bytes(last) > offset

    def total_bytes(self) -> int:
        """Return how many bytes a complete reading reads: the size of the present segments before compression."""
        return sum(map(num_written_bytes, self.files()))

    def is_smaller_than(self, num_bytes: int) -> bool:
        """Whether the log has fewer than `num_bytes` bytes. Looks at no more files than needed."""
        return all(total < num_bytes for total in accumulate(map(num_written_bytes, self.files())))

    def events(self, until: int | None = None) -> Iterator[SequencedEvent]:
        """Yield every readable event in order, up to the event `until`."""
        for batch in self.batches(until):
            yield from batch.numbered()

    def batches(self, until: int | None = None) -> Iterator[Batch]:
        """Yield the same events as `events`, one batch per frame, with the frame's place and the gap before it."""
        return _up_to(until, self._intact())

    def end_so_far(self) -> Place:
        """Return the end that the log has now, as the name of a segment and an offset in it."""
        newest = self.files()[-1]
        return newest.name, num_written_bytes(newest)

    def batches_so_far(self, until: int | None = None, end: Place | None = None) -> Iterator[Batch]:
        """Yield the batches up to `end`; None: up to the end that the log has now, even if the log grows meanwhile."""
        end = end or self.end_so_far()
        last: Batch | None = None
        for batch in self.batches(until):
            if (batch.segment, batch.offset) < end:
                last = batch
                yield batch
            elif last is not None:
                self.num_events -= batch.decoded.num_events
                self.last_sequence, self.last_events = last.last_sequence, tuple(last.numbered())
                self.judge_ending(last.last_sequence, last.chain_hash.hex())
                return

    def batches_behind(self, sequence: int, head_hash: str = "") -> Iterator[Batch]:
        """Yield the batches after event `sequence`. The reading up to that event must have missed no event.

        The counters of this log then count only the batches that are yielded.

        Args:
            sequence: the last event of an earlier reading. It must be the last event of its frame.
            head_hash: chain hash (hex) of that frame. The chain hash of the next frame must follow from it. Empty: this
                is not checked. It need not be checked at the start of a segment whose header was compared before.

        Raises:
            LogError: the chain hash of the next frame does not follow from `head_hash`.
        """
        return self._intact(after=sequence, head_hash=head_hash)

    def batches_from(self, segment: str, offset: int) -> Iterator[Batch]:
        """Yield the batches from a place that an earlier reading returned. Skip unreadable frames; record no damage."""
        for frame, name, at in frames_from(self.path, segment, offset):
            if frame.kind is FrameKind.EVENTS:
                try:
                    decoded = self._decoder.decode_frame(frame.payload)
                except CodecError:
                    continue
                if decoded.num_events != frame.num_events:
                    continue
                yield Batch(frame.first_sequence, decoded, name, at, at + frame_bytes(frame), frame.chain_hash)

    def trusted_events(self) -> Iterator[SequencedEvent]:
        """Yield the events before the first missing event. Read the later events, too, but only to find damage.

        Events after a gap cannot be folded, because the state before them is unknown.
        """
        for events in self.trusted_frames():
            yield from events

    def trusted_frames(self) -> Iterator[Iterable[SequencedEvent]]:
        """Yield the same events as `trusted_events`, one frame at a time."""
        for batch in self.batches():
            if self.is_trusted:
                yield batch.numbered()

    @property
    def is_trusted(self) -> bool:
        """Whether the last batch that was read can be folded, because no event before it is missing.

        If folding begins at a snapshot, events that the snapshot contains may be missing.
        """
        return self.start_sequence < self.last_sequence <= self.trusted_sequence

    def _intact(self, *, after: int = 0, head_hash: str = "") -> Iterator[Batch]:
        self._reader.from_sequence = after + 1
        self.ending, self._was_open = _NOT_READ, is_being_written(self.path)
        self.damage.clear()
        self.num_bytes = self.num_frames = self.num_events = 0
        self.first_sequence = self.last_sequence = 0
        self.trusted_sequence = after or self.start_sequence
        self._decoder.num_skipped.clear()
        num_taken, expected = 0, after + 1
        last: Batch | None = None
        for frame in self._reader:
            num_taken = self._take_damage(num_taken)
            self._count(frame)
            if frame.kind is FrameKind.GAP:
                reason = frame.payload.decode(errors="replace")
                detail = f"{plural(frame.num_events, 'event')} could not be written: {reason}"
                self._report("lost_events", frame, detail)
                continue
            try:
                decoded = self._decoder.decode_frame(frame.payload)
            except CodecError as error:
                self._report("undecodable", frame, str(error))
                continue
            if decoded.num_events != frame.num_events:
                detail = f"the frame declares {plural(frame.num_events, 'event')} and contains {decoded.num_events}"
                self._report("miscounted", frame, detail)
                continue
            self.num_events += decoded.num_events
            if frame.first_sequence == self.trusted_sequence + 1:
                self.trusted_sequence += frame.num_events
            if last is None and head_hash and next_chain_hash(bytes.fromhex(head_hash), frame) != frame.chain_hash:
                raise LogError(f"{self.path}: event {frame.first_sequence} does not follow from chain hash {head_hash}")
            self._check_payloads(frame, decoded)
            gap = None
            if frame.first_sequence != expected:
                last_missing = frame.first_sequence - 1
                gap = Gap(expected, last_missing, is_in_snapshot=last_missing <= self.start_sequence)
            expected = frame.next_sequence
            segment, offset = self._reader.place
            last = Batch(
                frame.first_sequence, decoded, segment, offset, offset + frame_bytes(frame), frame.chain_hash, gap
            )
            yield last
        if last is not None:
            self.last_events = tuple(last.numbered())
        self._take_damage(num_taken)
        if self.judge_ending(self._reader.next_sequence - 1, self.head_hash).contradiction:
            place, offset = self._reader.tail or (self.path, 0)
            sequence, detail = self._reader.next_sequence - 1, self.ending.contradiction
            self.damage.append(Damage("chain_broken", place.name, offset, sequence, detail, 0))

    def _check_payloads(self, frame: Frame, decoded: DecodedFrame) -> None:
        """Record damage for each event that its installed extension cannot decode. The event is yielded anyway."""
        if not self.core.extensions:
            return
        for sequence, event in decoded.numbered(frame.first_sequence):
            if not isinstance(event, ExtensionEvent):
                continue
            for kind in filter(None, [extension.payload_type(event) for extension in self.core.extensions]):
                try:
                    from_msgpack(event.payload, kind)
                except Undecodable as error:
                    detail = f"event {sequence}: extension {event.extension} cannot decode its {event.name}: {error}"
                    segment, offset = self._reader.place
                    self.damage.append(Damage("undecodable", segment, offset, sequence, detail, 0))

    def _count(self, frame: Frame) -> None:
        num_bytes = frame_bytes(frame)
        self.num_bytes += num_bytes
        self.num_frames += 1
        self.first_sequence = self.first_sequence or frame.first_sequence
        self.last_sequence = frame.next_sequence - 1
        if self.on_bytes is not None:
            self.on_bytes(num_bytes)

    def _report(self, kind: str, frame: Frame, detail: str) -> None:
        segment, offset = self._reader.place
        self.damage.append(Damage(kind, segment, offset, frame.first_sequence, detail, frame_bytes(frame)))

    def _take_damage(self, num_taken: int) -> int:
        self.damage += self._reader.damage[num_taken:]
        return len(self._reader.damage)


def _up_to(until: int | None, batches: Iterator[Batch]) -> Iterator[Batch]:
    for batch in batches:
        if until is None or batch.last_sequence <= until:
            yield batch
            continue
        if batch.first_sequence <= until:
            yield batch.up_to(until)
        return


def open_log(
    path: Path, core: Core | None = None, *, lenient: bool = False, trusts_snapshots: bool = False
) -> StoredLog:
    """Open the log at `path`, which `sources.find_logs` has found. `core` decodes it; default: the standard core.

    With `lenient`, events that this version does not know are skipped and counted. With `trusts_snapshots`, snapshots
    that other code computed are used if the log has lost its beginning.

    Raises:
        CommandFailed: the log cannot be read, is no kvledger log, or was written by a newer version. Or `path` is a
            symbolic link; `find_logs` follows a link only if the link is its argument.
    """
    core = core or Core.standard()
    try:
        if path.is_symlink():
            raise refused_link(path)
        reader = read_log(path)
        header: dict[str, object] = reader.header
        if not header:
            return _without_header(path, core, reader, lenient=lenient)
        _check_numbers(header)
        core = core.reading(header, available_extensions())
        decoder = EventDecoder(core, header, lenient=lenient)
        return StoredLog(
            path,
            core,
            header,
            _configuration(header),
            trusts_snapshots=trusts_snapshots,
            decoder=decoder,
            reader=reader,
        )
    except OSError as error:
        raise CommandFailed(f"{path}: {unreadable_text(error)}", ExitCode.DAMAGED) from error
    except (LogError, CodecError, CoreError) as error:
        hint = "; or skip unknown events with --lenient" if isinstance(error, SchemaTooNew) else ""
        raise CommandFailed(f"{path}: {error}{hint}", ExitCode.DAMAGED) from error


def _without_header(path: Path, core: Core, reader: LogReader, *, lenient: bool) -> StoredLog:
    """Open a log without an intact header, if its events are encoded as this version encodes them."""
    decoder = EventDecoder(core, vocabulary_header(core), lenient=lenient)
    why = "it holds no intact event"
    for frame in reader:
        if frame.kind is FrameKind.EVENTS:
            try:
                decoder.decode_frame(frame.payload)
            except CodecError as error:
                why = str(error)
                break
            return StoredLog(path, core, {}, None, decoder=decoder, reader=reader)
    found = "; ".join(damage.detail for damage in reader.damage) or "it is empty"
    message = (
        f"{path}: no segment has a readable header, so its events cannot be decoded: {found}; {why}. Give another "
        "log, or a copy of this log from before the damage"
    )
    raise CommandFailed(message, ExitCode.DAMAGED)


_NUMBERS_OF_HEADER: Mapping[str, tuple[int, int]] = {
    "opened_at_unix_ns": (0, MAX_NS),
    "process_id": (0, MAX_INT64),
    "worker_rank": (0, MAX_INT64),
}
"""Key of a header → its smallest and its largest value."""


def _check_numbers(header: Mapping[str, object]) -> None:
    for name, (least, most) in _NUMBERS_OF_HEADER.items():
        value = header.get(name)
        if isinstance(value, int) and not least <= value <= most:
            raise CodecError(f"the log's header has a {name} outside its range ({least} to {most}); it is damaged")


def _configuration(header: Mapping[str, object]) -> LedgerConfiguration:
    given = header.get("configuration")
    if not isinstance(given, dict):
        raise CodecError("the log's header has no configuration; it was not written by kvledger's connector")
    known = {field.name for field in attrs.fields(LedgerConfiguration)}
    unknown = sorted(set(given) - known)
    if unknown:
        raise CodecError(
            f"the log's configuration has {', '.join(unknown)}, which this kvledger does not know; "
            f"it was written by kvledger {header.get('kvledger_version', 'unknown')}: use that version or a later one"
        )
    try:
        return converted(given, LedgerConfiguration)
    except Undecodable as error:
        raise CodecError(f"the log's configuration cannot be used: {error}") from error
