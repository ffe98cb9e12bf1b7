"""All mutants, one module per subject. Importing this package declares them."""

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
