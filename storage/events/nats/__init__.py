"""Ship logs to a NATS JetStream stream, and mirror a stream's logs as files. Nothing here runs in a serving process.

To ship a log is to copy it into the stream. The package needs the NATS client, which the extra `nats` installs.

- `Shipper` ships the logs of a directory. The command `kvledger ship` uses it.
- `mirror` writes a stream's logs as files. `logs_in_stream` lists these logs.
"""

from __future__ import annotations

from kvledger.storage.extras import require

require(__name__, "nats")

from kvledger.storage.events.nats.address import DEFAULT_STREAM, Access, StreamAddress
from kvledger.storage.events.nats.errors import LogForked, StreamError, StreamRefused, StreamUnavailable
from kvledger.storage.events.nats.messages import label_of
from kvledger.storage.events.nats.mirror import default_mirror_directory, logs_in_stream, mirror
from kvledger.storage.events.nats.shipment import LogProgress
from kvledger.storage.events.nats.shipper import Shipper, ShippingReport
from kvledger.storage.events.nats.stream import LogInStream, new_stream

__all__ = [
    "DEFAULT_STREAM",
    "Access",
    "LogForked",
    "LogInStream",
    "LogProgress",
    "Shipper",
    "ShippingReport",
    "StreamAddress",
    "StreamError",
    "StreamRefused",
    "StreamUnavailable",
    "default_mirror_directory",
    "label_of",
    "logs_in_stream",
    "mirror",
    "new_stream",
]
