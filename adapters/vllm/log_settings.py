"""The keys of `kv_connector_extra_config` about the log, and how a mapping of keys is refused.

The connector and the recorder share them.
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
"""Bytes. Each segment begins with a header of about 11 kB: vocabulary and configuration."""


_ADDRESS = re.compile(r"\s*[A-Za-z][A-Za-z0-9+.-]+:/")
_OF_VLLM = ("kv_connector", "kv_role", "kv_load_failure_policy", "kv_connector_module_path", "engine_id")


def unwritable(directory: Path, error: OSError) -> ConfigurationError:
    """Return the refusal of `log_dir`, or of a directory below it."""
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
    """Return the directory, or the nearest one above it that exists and may be looked at."""
    return next(each for each in (directory, *directory.parents) if os.path.lexists(each))


class LogSettings(pydantic.BaseModel):
    """Where events are written, how safely, and how many are kept."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    log_dir: Path | None = Path("kvledger-logs")
    """Directory for event logs; every engine start writes its own directory inside. null: no files."""

    durability: Durability = Durability.OS
    """os: the log survives the process, but a power cut may lose the last writes; disk: it survives the machine, except
    for what `sync_interval_ms` allows."""

    sync_interval_ms: pydantic.PositiveInt = 50
    """With durability disk: milliseconds between two syncs. A machine failure can lose the events of this time and of
    one sync, which takes as long as the disk needs."""

    max_log_wait_ms: pydantic.PositiveInt | None = 1000
    """Milliseconds that a step waits at most, and only once, until the log has begun a new file. After that, copies
    that only the waiting events record fail, and no hits are offered until the log has caught up. null: the step writes
    everything itself, for as long as it takes."""

    segment_bytes: pydantic.ByteSize = pydantic.ByteSize(64 * 1024**2)
    """Size at which the log begins a new file, at least 16 KiB: each begins with a header of about 11 kB."""

    max_log_bytes: pydantic.ByteSize | None = pydantic.Field(pydantic.ByteSize(16 * 1024**3), validate_default=True)
    """Size limit of all logs in `log_dir` together, at least 3 segments: kvledger deletes the oldest segments and
    records that. Exceeded by one segment while another is deleted, and by up to 4 while the snapshot that verifies the
    rest is being made. null: no limit."""

    max_log_age_hours: pydantic.PositiveFloat | None = None
    """Hours after its last write at which a segment in `log_dir` is deleted. null: no limit."""

    memory_log_bytes: pydantic.ByteSize = pydantic.ByteSize(64 * 1024**2)
    """Without `log_dir`: bytes of the newest events that are kept in memory."""

    digests: Literal["off", "all"] | Annotated[float, pydantic.Field(ge=0, le=1)] = "off"
    """Share of the copied blocks for which 64 bits are recorded, so that `verify` names where bytes changed: off, all,
    or a number between 0 and 1. Full blocks only; workers read each of them once more."""

    @property
    def digest_share(self) -> float:
        """`digests` as a number."""
        return {"off": 0.0, "all": 1.0}[self.digests] if isinstance(self.digests, str) else self.digests

    @pydantic.field_validator("*", mode="before")
    @classmethod
    def _take_no_truth_for_a_number(cls, value: object, info: pydantic.ValidationInfo) -> object:
        """Refuse a bool for a number, which pydantic would accept: true is 1 in Python."""
        is_asked_for = cls.model_fields[str(info.field_name)].annotation is bool
        return str(value) if isinstance(value, bool) and not is_asked_for else value

    @pydantic.field_validator("log_dir", mode="before")
    @classmethod
    def _take_no_address(cls, log_dir: object) -> object:
        """Refuse an address, which would become a path and be shown with its credentials."""
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
        """Check the mapping that vLLM passes on.

        Raises:
            ConfigurationError: names every wrong key, why, and what is allowed.
        """
        try:
            return cls.model_validate(extra_config)
        except pydantic.ValidationError as error:
            elsewhere = ("is a key of vLLM", "move it out of kv_connector_extra_config, next to it")
            found = refusals(error, cls.model_fields, dict.fromkeys(_OF_VLLM, elsewhere))
        raise ConfigurationError(*found)  # outside of `except`, without pydantic's longer text above it

    def refuse_few_segments(self, num_logs: int) -> None:
        """Refuse a `max_log_bytes` that is too small for the logs that one server's engines write at once.

        Raises:
            ConfigurationError: names the least size.
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
        """Refuse a `log_dir` that cannot be written, as far as a temporary file shows.

        Returns a warning if the disk is full, which is no reason to refuse it; otherwise nothing.

        Raises:
            ConfigurationError: with the directory and the system's reason.
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
