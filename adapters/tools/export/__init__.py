"""Exports a log in the formats of other tools: a trace for Perfetto, an HTML page for a ticket, OpenTelemetry spans.

While the log is read once, `trace.py` calls a `Sink` with the log's spans and instants. Each format is a subclass of
`Sink`. The HTML page also reads the events of the requests that it shows. This package neither opens logs nor judges
them.
"""
