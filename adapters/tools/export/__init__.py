"""Exports a log in the formats of other tools: a trace for Perfetto, an HTML page for a ticket, OpenTelemetry spans.

`trace.py` reads the log once and calls a `Sink` with its spans and instants. Each format is such a sink and does not
know events. Nothing here opens logs or judges them.
"""
