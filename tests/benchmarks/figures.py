"""What a benchmark says: figures beside their anchor in the same run. Nothing but attrs is needed for them.

Must not know what is measured, nor how it is stored and shown.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

import attrs


class CannotMeasure(Exception):
    """Something that a benchmark needs is not here; the text names it and the remedy."""


@attrs.frozen
class Spread:
    """The median over the rounds of a run, and what lies around it: the tenth and the ninetieth percentile."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of one value for each round."""
        ordered = sorted(values)
        low, high = (ordered[round(share * (len(ordered) - 1))] for share in (0.1, 0.9))
        return cls(low, statistics.median(ordered), high)

    def __str__(self) -> str:
        """`1.05 (1.03–1.08)`."""
        return self._text("")

    @property
    def as_multiple(self) -> str:
        """`1.05× (1.03–1.08)`, of a spread of ratios."""
        return self._text("×")

    def _text(self, sign: str) -> str:
        low, median, high = (f"{x:.2f}" if x >= 0.1 else f"{x:.2g}" for x in (self.low, self.median, self.high))
        return f"{median}{sign} ({low}–{high})" if low != high else f"{median}{sign}"


@attrs.frozen
class Figure:
    """One thing measured of one contender: a median with its unit, and its ratio to the anchor's in the same rounds."""

    what: str
    contender: str
    value: float
    unit: str
    anchor: str = ""
    """What it is compared with; empty for the anchor itself and for what has none."""
    ratio: Spread | None = None


def compared(what: str, unit: str, rounds: Mapping[str, Sequence[float]], *, anchor: str) -> list[Figure]:
    """Figures of contenders whose values were taken in turns: contender -> one value for each round."""
    return [
        Figure(what, name, statistics.median(values), unit)
        if name == anchor
        else Figure(
            what,
            name,
            statistics.median(values),
            unit,
            anchor,
            Spread.of([mine / its for mine, its in zip(values, rounds[anchor], strict=True)]),
        )
        for name, values in rounds.items()
    ]


def with_ratios(what: str, unit: str, rounds: Mapping[str, Sequence[float]], *, anchor: str) -> list[Figure]:
    """The medians of all contenders, and their ratios to the anchor's as figures of their own."""
    return [
        *(Figure(what, name, statistics.median(values), unit) for name, values in rounds.items()),
        *(
            attrs.evolve(figure, what=f"{what}, ratio to {anchor}")
            for figure in compared(what, unit, rounds, anchor=anchor)
            if figure.contender != anchor
        ),
    ]


def percentile_99(values: Sequence[float]) -> float:
    """The value that one in a hundred exceeds."""
    return sorted(values)[int(len(values) * 0.99)]


Cases = Mapping[str, Callable[[], Sequence[Figure]]]
"""Name of a case -> what measures it."""
