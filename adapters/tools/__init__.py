"""Tools that read logs: the `kvledger` command, the Python API, reasons, exports.

Only the commands `check` and `conformance` import the recorder, the connector or the lab.
"""
