"""What vLLM's scheduler is told about transfers, in the order of telling. It asserts on a word too many by itself."""

from __future__ import annotations

from typing import Any

import attrs


@attrs.define
class Told:
    """Request ids; a load that failed is told as received too, as vLLM wants it."""

    received: list[str] = attrs.field(factory=list)
    failed: list[str] = attrs.field(factory=list)
    sent: list[str] = attrs.field(factory=list)


def listen(engine: Any) -> Told:
    """Listen to an engine from now on."""
    told = Told()
    update = engine.connector.update_connector_output

    def heard(output: Any) -> None:
        update(output)
        told.received += sorted(output.finished_recving or ())
        told.failed += sorted(output.failed_recving or ())
        told.sent += sorted(output.finished_sending or ())

    engine.connector.update_connector_output = heard
    return told
