"""All mutants, one room per part of a request's life. Importing this declares them."""

from mutants.catalogue import (
    counts,
    deliveries,
    endings,
    evictions,
    exchanges,
    loads,
    lookups,
    order,
    reports,
    saves,
    spans,
    tables,
)

__all__ = [
    "counts",
    "deliveries",
    "endings",
    "evictions",
    "exchanges",
    "loads",
    "lookups",
    "order",
    "reports",
    "saves",
    "spans",
    "tables",
]
