"""Re-enacts a recording through the hooks of the connector that it is about: kvledger's own, or a recorded one."""

from __future__ import annotations

from collections.abc import Sequence

from kvledger.adapters.repro.connector import ConnectorUnderTest
from kvledger.adapters.repro.hooks import HookRun
from kvledger.adapters.repro.recording import Recording
from kvledger.adapters.repro.reenactment import Reenactment
from kvledger.adapters.repro.wrapped import WrappedRun, WrappedUnderTest


def reenact(recording: Recording, *, until: int | None = None, handlers: Sequence[str] = ()) -> Reenactment:
    """Make the recorded hook calls again.

    Args:
        recording: what was seen.
        until: end with the call that made this event of the recorded log.
        handlers: state handlers of one's own, as "module:Class", if the engine had any.

    Raises:
        NotReenactable: the connector cannot be configured as it was.
    """
    recording = recording.until(until)
    if recording.wrapped is not None:
        return WrappedRun(recording, WrappedUnderTest(recording, recording.wrapped)).run()
    connector = ConnectorUnderTest(
        recording.configuration,
        speculates=recording.speculates,
        zeroes_new_blocks=recording.zeroes_new_blocks,
        handlers=handlers,
    )
    return HookRun(recording, connector).run()
