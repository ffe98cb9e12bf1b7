"""`kvledger ship`: copy the logs of this machine into a NATS JetStream stream, or list the logs of a stream."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import attrs
from cyclopts import Parameter

from kvledger.adapters.tools.cli.options import DEFAULT_LOG, num_bytes, positive, seconds, value
from kvledger.adapters.tools.cli.output import Output, Written, progress_in_bytes
from kvledger.adapters.tools.exit_codes import CommandFailed, ExitCode
from kvledger.adapters.tools.logs.streams import StreamUrl, parse_address, shown_log, stream_errors
from kvledger.adapters.units import plural, size

if TYPE_CHECKING:
    from kvledger.storage.events.nats import Shipper, ShippingReport


_NEW: Final = "If the stream does not exist"


def run(
    log: Annotated[Path | None, Parameter(env_var=DEFAULT_LOG, help="a log directory, or a directory of logs")] = None,
    *,
    to: Annotated[
        StreamUrl | None, value(StreamUrl, "URL", help="nats://host[:port][/STREAM]; tls:// requires encryption")
    ] = None,
    list_: Annotated[
        StreamUrl | None, value(StreamUrl, "URL", name="--list", help="list the logs of this stream, and ship nothing")
    ] = None,
    follow: Annotated[bool, Parameter(help="keep shipping new events and new logs until you stop the command")] = False,
    label: Annotated[
        str | None, Parameter(help="name before the log id in the messages' NATS subjects; default: this host's name")
    ] = None,
    give_up_after: Annotated[
        float,
        value(
            seconds,
            "DURATION",
            help="without --follow: stop after this time (such as 90s) without progress; the default value shown "
            "here is in seconds",
        ),
    ] = 60.0,
    create_stream: Annotated[bool, Parameter(group=_NEW, help="create the stream with the options below")] = False,
    replicas: Annotated[int, value(positive, "N", group=_NEW, help="number of replicas: 1, 3 or 5")] = 1,
    max_age: Annotated[
        float,
        value(
            seconds,
            "DURATION",
            group=_NEW,
            help="let the stream drop messages that are older than this duration, such as 30d",
        ),
    ] = 0.0,
    max_bytes: Annotated[
        int, value(num_bytes, "SIZE", group=_NEW, help="largest size of the stream, such as 500GiB")
    ] = 0,
    discard: Annotated[
        Literal["new", "old"],
        Parameter(
            group=_NEW,
            help="new: a full stream refuses messages, and shippers wait; old: a full stream drops its oldest messages",
        ),
    ] = "new",
    output: Written,
) -> ExitCode:
    """Ship or list logs. Credentials come from the environment, as for every command that reads a stream."""
    if to is not None and list_ is not None:
        raise CommandFailed("ship: give --to URL or --list URL, not both")
    if list_ is not None:
        return _list(list_, output)
    if to is None:
        raise CommandFailed("ship: a URL is missing; give --to nats://host or --list nats://host")
    if log is None:
        raise CommandFailed(f"ship: LOG is missing; give LOG, or set {DEFAULT_LOG} in the environment")
    if log.is_file():
        message = f"{log}: a segment alone cannot be shipped; give the directory of the log"
        raise CommandFailed(message)
    if not log.exists() and not follow:
        raise CommandFailed(f"{shown_log(log)} does not exist; give a log directory, or a directory of logs")
    address = parse_address(to)
    from kvledger.storage.events.nats import Access, Shipper, label_of, new_stream  # noqa: PLC0415 - a fifth of a second

    new = new_stream(num_replicas=replicas, max_age_s=max_age, max_bytes=max_bytes, keeps_newest=discard == "old")
    shipper = Shipper(
        log,
        attrs.evolve(address, log_id=None),
        Access.from_environment(),
        label_of(label or socket.gethostname()),
        follow=follow,
        new_stream=new if create_stream else None,
        give_up_after_s=give_up_after,
        on_remark=lambda of_log, text: output.remark(text if of_log is None else f"{of_log.directory}: {text}"),
    )
    with stream_errors():
        report = _ship_with_progress(shipper) if sys.stderr.isatty() else asyncio.run(_ship(shipper))
    exit_code = _exit_code(report)
    _show(report, exit_code, output)
    return exit_code


async def _ship(shipper: Shipper) -> ShippingReport:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(NotImplementedError, RuntimeError):  # not the main thread
            loop.add_signal_handler(number, shipper.stop)
    return await shipper.run()


def _ship_with_progress(shipper: Shipper) -> ShippingReport:
    with progress_in_bytes() as progress:
        task = progress.add_task("shipping", total=None)

        def update() -> None:
            shipped = sum(log.num_bytes for log in shipper.logs.values())
            progress.update(task, completed=shipped, total=shipped + shipper.report().num_bytes_behind)

        shipper.on_progress = update
        return asyncio.run(_ship(shipper))


def _exit_code(report: ShippingReport) -> ExitCode:
    if report.is_damaged:
        return ExitCode.DAMAGED
    if report.is_refused:
        return ExitCode.REFUSED
    return ExitCode.SOUND if report.is_complete else ExitCode.TRY_AGAIN


def _show(report: ShippingReport, exit_code: ExitCode, output: Output) -> None:
    for log in report.logs:
        next_sequence = 1 if log.last is None else log.last.next_sequence
        if output.is_json:
            fields = {
                "path": str(log.directory),
                "log_id": log.log_id,
                "subject": log.subject,
                "num_frames": log.num_frames,
                "num_bytes": log.num_bytes,
                "last_sequence": next_sequence - 1,
                "head_hash": "" if log.last is None else log.last.chain_hash.hex(),
                "lost": [[first, last] for first, last in log.lost.items()],
                "problem": log.problem,
            }
            output.record("shipped", fields)
        else:
            new = f"{plural(log.num_frames, 'frame')}, {size(log.num_bytes)} shipped, up to event {next_sequence - 1}"
            output.field(log.log_id[:12] or "?", f"{log.directory}: {new}{'; shipping stopped' if log.problem else ''}")
    if output.is_json:
        summary = {
            "exit_code": exit_code.value,
            "is_complete": report.is_complete,
            "num_bytes_behind": report.num_bytes_behind,
        }
        output.record("shipping", summary)
    elif report.num_bytes_behind:
        output.remark(
            f"{size(report.num_bytes_behind)} of the logs are not shipped yet; run the command again to ship the rest"
        )


def _list(url: StreamUrl, output: Output) -> ExitCode:
    address = parse_address(url)
    from kvledger.storage.events.nats import logs_in_stream  # noqa: PLC0415

    with stream_errors():
        logs = logs_in_stream(address)
    rows = []
    for log in logs:
        header = {} if log.header is None else log.header.header
        first = 0 if log.header is None else log.header.first_sequence
        last = 0 if log.last is None else log.last.next_sequence - 1
        if output.is_json:
            fields = {
                "log_id": log.log_id,
                "label": log.label,
                "subject": log.subject,
                "num_messages": log.num_messages,
                "first_sequence": first or None,
                "last_sequence": last or None,
                "opened_at_unix_ns": header.get("opened_at_unix_ns"),
                "head_hash": None if log.last is None else log.last.chain_hash.hex(),
            }
            output.record("log_in_stream", fields)
        events = f"{first}-{last}" if first else f"…-{last}"
        rows.append([log.log_id, log.label, events, str(log.num_messages)])
    if not output.is_json:
        output.table({"log": "left", "label": "left", "events": "right", "messages": "right"}, rows)
    return ExitCode.SOUND
