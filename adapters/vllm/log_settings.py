"""The keys of `kv_connector_extra_config` that say where a log goes, and how a mapping of keys is refused.

They are the same for the connector and for the recorder.
"""

from __future__ import annotations

import difflib
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pydantic
from pydantic_core import ErrorDetails

from kvledger.lifecycle import ConfigurationError
from kvledger.storage.events import Durability

MIN_SEGMENT_BYTES = 16 * 1024
"""Each segment begins with a header of about 10 kB, vocabulary and configuration; smaller ones hold little else."""


_VLLM_KEYS = ("kv_connector", "kv_role", "kv_load_failure_policy", "kv_connector_module_path", "engine_id")


def unknown(name: str, known: Iterable[str], what: str = "key") -> str:
    """What to say of a name that means nothing: the nearest that does, or all of them."""
    nearest = difflib.get_close_matches(name, known, n=1)
    return f"unknown {what}; " + (f"did you mean {nearest[0]}?" if nearest else f"known are {', '.join(known)}")


def unwritable(directory: Path, error: OSError) -> ConfigurationError:
    """What to say of a directory below `log_dir`, or of itself."""
    reason = error.strerror or error
    return ConfigurationError(
        f"log_dir: cannot write to {directory} ({reason}); name a writable directory, or null for no files"
    )


class LogSettings(pydantic.BaseModel):
    """Where events are written, how safely, and how many are kept."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    log_dir: Path | None = Path("kvledger-logs")
    """Where event logs go; every engine start writes a directory of its own inside. null: no files."""

    durability: Durability = Durability.OS
    """os: survives the process; disk: survives the machine, but for the last milliseconds."""

    sync_interval_ms: pydantic.PositiveInt = 50
    """With durability disk: the most that a machine failure can lose."""

    max_log_wait_ms: pydantic.PositiveInt | None = 50
    """How long a step waits for what is more than a write into memory, such as a new file. Then it goes on as if that
    could not be written: what the workers have not been given yet they are not given. null: the step itself writes
    everything, for as long as it takes."""

    segment_bytes: pydantic.ByteSize = pydantic.ByteSize(64 * 1024**2)
    """Size at which the log begins a new file, at least 16 KiB: each begins with a header of about 10 kB."""

    max_log_bytes: pydantic.ByteSize | None = pydantic.Field(pydantic.ByteSize(16 * 1024**3), validate_default=True)
    """What all logs in `log_dir` together may take, plus one segment: the oldest segments are retired, with a record of
    that. null: no limit."""

    max_log_age_hours: pydantic.PositiveFloat | None = None
    """Segments in `log_dir` that were last written to longer ago are retired. null: no limit."""

    memory_log_bytes: pydantic.ByteSize = pydantic.ByteSize(64 * 1024**2)
    """Without `log_dir`: the newest events that are kept."""

    digests: Literal["off", "all"] | Annotated[float, pydantic.Field(ge=0, le=1)] = "off"
    """Of which part of what is copied 64 bits are written for each whole block, so that `verify` names where bytes
    changed: off, all, or a share between 0 and 1. Workers read every such block once more."""

    @property
    def digest_share(self) -> float:
        """The same as a number."""
        return {"off": 0.0, "all": 1.0}[self.digests] if isinstance(self.digests, str) else self.digests

    @pydantic.field_validator("segment_bytes")
    @classmethod
    def _check_segment_bytes(cls, segment_bytes: pydantic.ByteSize) -> pydantic.ByteSize:
        if segment_bytes < MIN_SEGMENT_BYTES:
            message = f"each segment begins with a header of about 10 kB; say at least {MIN_SEGMENT_BYTES} bytes"
            raise ValueError(message)
        return segment_bytes

    @pydantic.field_validator("max_log_bytes")
    @classmethod
    def _check_log_bytes(
        cls, max_log_bytes: pydantic.ByteSize | None, info: pydantic.ValidationInfo
    ) -> pydantic.ByteSize | None:
        segment_bytes = info.data.get("segment_bytes", 0)
        if max_log_bytes is not None and max_log_bytes < segment_bytes:
            message = f"holds not one segment of {int(segment_bytes)} bytes; raise it, or lower segment_bytes"
            raise ValueError(message)
        return max_log_bytes

    @classmethod
    def from_extra_config(cls, extra_config: dict[str, Any]) -> Self:
        """Check the mapping that vLLM hands over.

        Raises:
            ConfigurationError: naming every key that is wrong, why, and what may stand there.
        """
        try:
            return cls.model_validate(extra_config)
        except pydantic.ValidationError as error:
            message = "kv_connector_extra_config cannot be used:\n  " + "\n  ".join(map(cls._in_words, error.errors()))
        raise ConfigurationError(message)  # pydantic's own words would stand above it, twice as long

    def refuse_log_dir(self) -> None:
        """Refuse a `log_dir` that cannot be written, as far as that is seen without writing anything that stays.

        Raises:
            ConfigurationError: with the directory and the system's reason.
        """
        if self.log_dir is None:
            return
        folder = self.log_dir.absolute()
        existing = next(each for each in (folder, *folder.parents) if each.exists())
        try:
            with tempfile.TemporaryFile(dir=existing) as file:  # has no name, where the system can make such
                file.write(bytes(MIN_SEGMENT_BYTES))
                file.flush()
        except OSError as error:
            raise unwritable(folder, error) from error

    @classmethod
    def _in_words(cls, problem: ErrorDetails) -> str:
        """Key, value, reason and remedy, in one line."""
        key = ".".join(map(str, problem["loc"]))
        given = f"{key}: {problem['input']!r}"
        if problem["type"] != "extra_forbidden":
            return f"{given}: {problem['msg'].removeprefix('Value error, ')}"
        if key in _VLLM_KEYS:
            return f"{given}: a key of vLLM's own; write it beside kv_connector_extra_config, not in it"
        return f"{given}: {unknown(key, cls.model_fields)}"
