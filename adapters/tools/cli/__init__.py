"""The `kvledger` command."""
