"""A curve on the HTML page: the tokens that pools of other sizes would have loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import attrs

from kvledger.adapters.tools.pool_sizes import Estimate, PoolSize

_WIDTH, _HEIGHT, _MARGIN = 640, 120, 12


@attrs.frozen
class Point:
    """Position of a pool size on the curve."""

    size: PoolSize
    x: float
    y: float


@attrs.frozen
class PoolCurve:
    """The curve for all logs together. X: size of the pool; y: tokens that a pool of this size would have loaded."""

    estimate: Estimate
    points: Sequence[Point]
    width: int = _WIDTH
    height: int = _HEIGHT

    @classmethod
    def of(cls, estimates: Sequence[Estimate]) -> Self | None:
        """Return the curve; None if there is no estimate, or no request needed tokens."""
        estimate = Estimate()
        for each in estimates:
            estimate = estimate.with_other(each)
        if not estimate.sizes or not estimate.num_tokens_asked:
            return None
        largest = estimate.sizes[-1].factor
        most = max(1, *(size.num_tokens_loaded for size in estimate.sizes))
        points = [
            Point(
                size,
                round((_WIDTH - 2 * _MARGIN) * size.factor / largest + _MARGIN, 1),
                round(_HEIGHT - (_HEIGHT - _MARGIN) * size.num_tokens_loaded / most, 1),
            )
            for size in estimate.sizes
        ]
        return cls(estimate, points)

    @property
    def path(self) -> str:
        """The area below the curve as an SVG path. It begins at a pool of size 0."""
        line = "".join(f"L{point.x} {point.y}" for point in self.points)
        return f"M{_MARGIN} {_HEIGHT}{line}V{_HEIGHT}Z"
