"""What is reported to vLLM's scheduler about transfers, in order. It asserts by itself on a report too many."""

from __future__ import annotations

from typing import Any

import attrs


@attrs.define
class Reported:
    """Request ids; a load that failed is reported as received too, as vLLM wants it."""

    received: list[str] = attrs.field(factory=list)
    failed: list[str] = attrs.field(factory=list)
    sent: list[str] = attrs.field(factory=list)


def note_reports(engine: Any) -> Reported:
    """Note what is reported from now on."""
    reported = Reported()
    update = engine.connector.update_connector_output

    def update_and_note(output: Any) -> None:
        update(output)
        reported.received += sorted(output.finished_recving or ())
        reported.failed += sorted(output.failed_recving or ())
        reported.sent += sorted(output.finished_sending or ())

    engine.connector.update_connector_output = update_and_note
    return reported
