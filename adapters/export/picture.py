"""Where things stand on a page's axis of time: ticks, shares of the width, and curves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from kvledger.adapters.export.shown import SERIES

NUM_COLUMNS = 800
_MAX_TICKS = 8
_STEPS_NS = [base * 10**power for power in range(1, 15) for base in (1, 2, 5)]


@attrs.frozen
class Axis:
    """The time that is drawn."""

    first_ns: int
    last_ns: int

    def share(self, time_ns: int) -> float:
        """Where a time lies, from 0 to 1; what lies outside lies on the border."""
        return min(1.0, max(0.0, (time_ns - self.first_ns) / max(1, self.last_ns - self.first_ns)))

    def percent(self, time_ns: int, until_ns: int | None = None) -> str:
        """The same in percent of the width; with `until_ns`, how wide the time between is."""
        share = self.share(time_ns)
        if until_ns is not None:
            share = self.share(until_ns) - share
        return f"{share * 100:.4f}".rstrip("0").rstrip(".") + "%"

    def ticks(self) -> range:
        """Round times, at most `_MAX_TICKS` or so."""
        length = self.last_ns - self.first_ns
        step = next((step for step in _STEPS_NS if length / step <= _MAX_TICKS), _STEPS_NS[-1])
        return range(-(-self.first_ns // step) * step, self.last_ns + 1, step)


def curves(axis: Axis, samples: Sequence[tuple[int, tuple[int, ...]]]) -> Iterator[tuple[str, int, str]]:
    """Of each series its name, its highest value, and the area below it as an SVG path, `NUM_COLUMNS` by 100."""
    for index, name in enumerate(SERIES):
        columns = [0] * (NUM_COLUMNS + 1)
        last_column = value = 0
        for time_ns, values in (*samples, (axis.last_ns, samples[-1][1] if samples else (0,) * len(SERIES))):
            column = int(axis.share(time_ns) * NUM_COLUMNS)
            for between in range(last_column, column + 1):
                columns[between] = max(columns[between], value)
            last_column, value = column, values[index]
            columns[column] = max(columns[column], value)
        highest = max(columns)
        path, drawn = ["M0 100"], 0
        for column, count in enumerate(columns[:-1]):
            if count != drawn:
                path.append(f"H{column}V{100 - round(count * 100 / highest)}")
                drawn = count
        yield name, highest, "".join(path) + f"H{NUM_COLUMNS}V100Z"
