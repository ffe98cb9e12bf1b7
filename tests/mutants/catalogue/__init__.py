"""All mutants, one room per part of a request's life. Importing this declares them."""

from mutants.catalogue import endings, loads, lookups, reports, saves, tables

__all__ = ["endings", "loads", "lookups", "reports", "saves", "tables"]
