"""Defines the keys of `kv_connector_extra_config` about the log, and the errors for wrong keys and values.

The connector and the recorder both use this module.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pydantic

from kvledger.adapters.units import written_size
from kvledger.adapters.vllm.refusals import refusals
from kvledger.lifecycle import ConfigurationError, Refusal, without_credentials
from kvledger.storage.events import MIN_LOG_SEGMENTS, Durability
from kvledger.storage.events.files import RefusedFile, is_full

MIN_SEGMENT_BYTES = 16 * 1024
"""Smallest size of a segment in bytes. Each segment begins with a header of about 11 kB, which describes the events and
the configuration."""


_ADDRESS = re.compile(r"\s*[A-Za-z][A-Za-z0-9+.-]+:/")
_OF_VLLM = ("kv_connector", "kv_role", "kv_load_failure_policy", "kv_connector_module_path", "engine_id")


def unwritable(directory: Path, error: OSError) -> ConfigurationError:
    """Return the error for a `directory` that cannot be written: `log_dir`, or a directory below it."""
    existing = _existing(directory)
    if isinstance(error, RefusedFile):
        return ConfigurationError(
            Refusal(f"{error.filename} {error.strerror}", error.remedy, "log_dir", str(directory))
        )
    if existing.is_dir():
        reason = f"cannot write to {existing} ({error.strerror or error})"
    elif existing.is_symlink():
        reason = f"{existing} is a symbolic link that leads to nothing, to a file or to itself"
    else:
        reason = f"{existing} is a file"
    return ConfigurationError(
        Refusal(reason, "name a writable directory, or null for no files", "log_dir", str(directory))
    )


def _existing(directory: Path) -> Path:
    """Return the directory if it exists, otherwise the nearest path above it that exists and can be looked up."""
    return next(each for each in (directory, *directory.parents) if os.path.lexists(each))


class LogSettings(pydantic.BaseModel):
    """Where events are written, how safely, and how many are kept."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    log_dir: Path | None = Path("kvledger-logs")
    """Directory for event logs. Every engine start creates its own directory in it. null: kvledger writes no files."""

    durability: Durability = Durability.OS
    """os: the log survives if the process ends suddenly, but a power cut may lose the latest writes. disk: the log also
    survives a power cut, except for the events that `sync_interval_ms` allows to be lost."""

    sync_interval_ms: pydantic.PositiveInt = 50
    """With `durability` disk: milliseconds between two syncs of the log to the disk. If the machine fails, the log may
    lose the events of one such interval and the events that kvledger recorded during one sync. How long a sync takes
    depends on the disk."""

    max_log_wait_ms: pydantic.PositiveInt | None = 1000
    """Longest time in milliseconds that a step waits for the log to begin a new segment file. After this time, events
    wait in memory, and later steps do not wait. Until all events are written, kvledger offers no hits, and a copy
    counts as failed if its event is not written yet. null: a step writes everything itself, however long that takes."""

    segment_bytes: pydantic.ByteSize = pydantic.ByteSize(64 * 1024**2)
    """Size at which the log begins a new segment. At least 16 KiB, because each segment begins with a header of about
    11 kB."""

    max_log_bytes: pydantic.ByteSize | None = pydantic.Field(pydantic.ByteSize(16 * 1024**3), validate_default=True)
    """Size limit of all logs in `log_dir` together, at least 3 times `segment_bytes`. To keep the limit, kvledger
    deletes the oldest segments and records their deletion. During a deletion, the logs may exceed the limit by one
    segment. If kvledger must first make a snapshot, so that the remaining segments can be verified, the logs may exceed
    the limit by up to 4 segments. null: no limit."""

    max_log_age_hours: pydantic.PositiveFloat | None = None
    """kvledger deletes a segment from `log_dir` this many hours after the last write to the segment. null: no limit."""

    memory_log_bytes: pydantic.ByteSize = pydantic.ByteSize(64 * 1024**2)
    """Only if `log_dir` is null: how many bytes of events kvledger keeps in memory. If there are more, it drops the
    oldest events."""

    digests: Literal["off", "all"] | Annotated[float, pydantic.Field(ge=0, le=1)] = "off"
    """Share of the copied blocks for which workers record a hash of 64 bits (digest): off, all, or a number from 0 to
    1. From the digests, `kvledger verify` finds where the bytes of a block changed. Only full blocks have digests. For
    each digest, a worker reads the block one more time."""

    @property
    def digest_share(self) -> float:
        """`digests` as a number."""
        return {"off": 0.0, "all": 1.0}[self.digests] if isinstance(self.digests, str) else self.digests

    @pydantic.field_validator("*", mode="before")
    @classmethod
    def _take_no_truth_for_a_number(cls, value: object, info: pydantic.ValidationInfo) -> object:
        """Refuse true and false for a number. Pydantic would accept them, because true is 1 in Python."""
        is_asked_for = cls.model_fields[str(info.field_name)].annotation is bool
        return str(value) if isinstance(value, bool) and not is_asked_for else value

    @pydantic.field_validator("log_dir", mode="before")
    @classmethod
    def _take_no_address(cls, log_dir: object) -> object:
        """Refuse a URL for `log_dir`. If it were taken for a path, messages would show its credentials."""
        if isinstance(log_dir, str) and _ADDRESS.match(log_dir):
            remedy = "name a directory; `kvledger ship` copies its logs into a stream"
            shown = without_credentials(log_dir, is_address=True)
            raise ConfigurationError(Refusal("is an address, not a directory", remedy, "log_dir", shown))
        return log_dir

    @pydantic.field_validator("segment_bytes")
    @classmethod
    def _check_segment_bytes(cls, segment_bytes: pydantic.ByteSize) -> pydantic.ByteSize:
        if segment_bytes < MIN_SEGMENT_BYTES:
            remedy = f"write {written_size(MIN_SEGMENT_BYTES)!r} or more"
            raise ConfigurationError(Refusal("is too small: each segment begins with a header of about 11 kB", remedy))
        return segment_bytes

    @pydantic.field_validator("max_log_bytes")
    @classmethod
    def _check_log_bytes(
        cls, max_log_bytes: pydantic.ByteSize | None, info: pydantic.ValidationInfo
    ) -> pydantic.ByteSize | None:
        segment_bytes = info.data.get("segment_bytes", 0)
        least = MIN_LOG_SEGMENTS * segment_bytes
        if max_log_bytes is not None and max_log_bytes < least:
            reason = (
                f"is too small: a log needs {MIN_LOG_SEGMENTS} segments of {written_size(segment_bytes)} to be "
                "readable: the one that is being written, the one before it, and one for their snapshots"
            )
            remedy = f"write {written_size(least)!r} or more, or lower segment_bytes"
            raise ConfigurationError(Refusal(reason, remedy))
        return max_log_bytes

    @classmethod
    def from_extra_config(cls, extra_config: dict[str, Any]) -> Self:
        """Return the settings in `kv_connector_extra_config`, which vLLM passes on unchecked.

        Raises:
            ConfigurationError: names every wrong key, why it is wrong, and what is allowed.
        """
        try:
            return cls.model_validate(extra_config)
        except pydantic.ValidationError as error:
            elsewhere = ("is a key of vLLM", "move it out of kv_connector_extra_config, next to kv_connector")
            found = refusals(error, cls.model_fields, dict.fromkeys(_OF_VLLM, elsewhere))
        raise ConfigurationError(*found)  # outside of `except`, without pydantic's longer text above it

    def refuse_few_segments(self, num_logs: int) -> None:
        """Refuse a `max_log_bytes` that is too small for the logs that one server's engines write at once.

        Raises:
            ConfigurationError: `max_log_bytes` is too small. The error names the smallest allowed size.
        """
        least = MIN_LOG_SEGMENTS * self.segment_bytes * num_logs
        if self.log_dir is not None and self.max_log_bytes is not None and self.max_log_bytes < least:
            reason = (
                f"is too small: this server writes {num_logs} logs at once, and each needs {MIN_LOG_SEGMENTS} segments "
                f"of {written_size(self.segment_bytes)} to be readable"
            )
            remedy = f"write {written_size(least)!r} or more, or lower segment_bytes"
            raise ConfigurationError(Refusal(reason, remedy, "max_log_bytes", written_size(self.max_log_bytes)))

    def refuse_log_dir(self) -> str:
        """Refuse a `log_dir` in which no temporary file can be written.

        Returns a warning if the disk is full, because kvledger can start with a full disk; otherwise an empty string.

        Raises:
            ConfigurationError: names the directory and the operating system's reason.
        """
        if self.log_dir is None:
            return ""
        folder = self.log_dir.absolute()
        try:
            with tempfile.TemporaryFile(dir=_existing(folder)) as file:  # without a name, if the system can do that
                file.write(bytes(MIN_SEGMENT_BYTES))
                file.flush()
        except OSError as error:
            if is_full(error):
                return (
                    f"the disk of log_dir {str(folder)!r} is full ({error.strerror}): at start kvledger deletes the "
                    "oldest segments there; if this frees too little, it serves requests without a log file, without "
                    "hits and without new copies until there is room; lower max_log_bytes, or delete other files"
                )
            raise unwritable(folder, error) from error
        return ""
