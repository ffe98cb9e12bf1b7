"""A log in the formats of other tools: a trace for Perfetto, a page for a ticket, tables for a notebook, spans.

`trace.py` folds the log once and shows a `Visitor` its spans and instants; each format is such a visitor and knows
nothing of events. Nothing here opens logs or decides what is right.
"""
