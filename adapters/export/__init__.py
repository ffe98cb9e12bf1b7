"""A log in the formats of other tools: a trace for Perfetto, a page for a ticket, tables for a notebook.

`chronicle.py` folds the log once and tells a `Listener` what began, ended and happened; each format is such a listener
and knows nothing of events. Nothing here opens logs or decides what is right.
"""
