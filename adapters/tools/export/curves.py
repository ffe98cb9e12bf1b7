"""The curves below the time axis of the HTML page, as areas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from kvledger.adapters.tools.export.axis import Axis
from kvledger.adapters.tools.export.shown import SERIES

NUM_COLUMNS = 800
HEIGHT = 100

Samples = Sequence[tuple[int, tuple[int, ...]]]
"""(time, value of each series in `SERIES` from that time on)."""


@attrs.frozen
class Curve:
    """One series, for all logs."""

    name: str
    highest: int
    paths: Sequence[str]
    """For each log, the area below its curve, as an SVG path of `NUM_COLUMNS` by `HEIGHT`."""


def curves(axis: Axis, of_logs: Sequence[Samples]) -> Iterator[Curve]:
    """Yield the curves that are not always 0."""
    for index, name in enumerate(SERIES):
        columns = [_columns(axis, samples, index) for samples in of_logs if samples]
        highest = max(map(max, columns), default=0)
        if highest:
            yield Curve(name, highest, [_path(each, highest) for each in columns])


def _columns(axis: Axis, samples: Samples, index: int) -> list[int]:
    """Return the highest value in each column."""
    columns = [0] * (NUM_COLUMNS + 1)
    last_column, value = int(axis.share(samples[0][0]) * NUM_COLUMNS), 0
    for time_ns, values in samples:
        column = int(axis.share(time_ns) * NUM_COLUMNS)
        for between in range(last_column, column + 1):
            columns[between] = max(columns[between], value)
        last_column, value = column, values[index]
        columns[column] = max(columns[column], value)
    return columns


def _path(columns: Sequence[int], highest: int) -> str:
    path, drawn = [f"M0 {HEIGHT}"], 0
    for column, count in enumerate(columns[:-1]):
        if count != drawn:
            path.append(f"H{column}V{HEIGHT - round(count * HEIGHT / highest)}")
            drawn = count
    return "".join(path) + f"H{NUM_COLUMNS}V{HEIGHT}Z"
