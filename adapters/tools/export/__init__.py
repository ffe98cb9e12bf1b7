"""Exports a log in the formats of other tools: a trace for Perfetto, an HTML page for a ticket, OpenTelemetry spans.

`trace.py` reads the log once and calls a `Sink` with the log's spans and instants. Each format is a subclass of `Sink`
and must not depend on events. This package neither opens logs nor judges them.
"""
