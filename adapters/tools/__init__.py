"""Read logs for people: the `kvledger` command, reasons, exports. Imports nothing of the recorder or the lab."""
