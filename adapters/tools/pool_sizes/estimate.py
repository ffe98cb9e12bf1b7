"""The estimate: for each pool size, the tokens that a pool of this size would have loaded."""

from __future__ import annotations

import attrs

FACTORS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0)
"""Pool sizes, as multiples of the size that the pool really had."""
_NAMES = {0.5: "half", 1.0: "as it was", 2.0: "twice", 4.0: "4 times", 10.0: "10 times"}

_SMALL = 0.0005


@attrs.frozen
class PoolSize:
    """A pool of the real size or of another size, and its estimate."""

    factor: float
    num_slots: int | None
    """Slots of the pool; None: the pools of several logs have different sizes."""
    num_tokens_loaded: int
    """Estimated tokens that this pool would have loaded."""

    @property
    def name(self) -> str:
        """Name of the size in tables; empty if tables leave the size out."""
        return _NAMES.get(self.factor, "")


@attrs.frozen
class Estimate:
    """The estimate for one log or several."""

    sizes: tuple[PoolSize, ...] = ()
    """Pool sizes in ascending order; empty if there is no estimate."""
    num_tokens_asked: int = 0
    """Tokens of admitted requests that vLLM's prefix cache did not have, but that an infinite pool would have loaded.
    This pool contains all chunks from the beginning."""
    num_tokens_loaded: int = 0
    """Tokens that were really loaded."""
    one_of: int = 1
    """The estimate uses a sample: one of this many chunks. 1: all chunks."""
    why_not: str = ""
    """Reason why there is no estimate; empty if there is an estimate, or no log."""
    note: str = ""
    """What the estimate leaves out, in words; empty: nothing."""

    @property
    def error(self) -> float | None:
        """Relative error of the estimate for the pool's real size, positive if too high; None if nothing was loaded."""
        own = next((size for size in self.sizes if size.factor == 1), None)
        if own is None or not self.num_tokens_loaded:
            return None
        return own.num_tokens_loaded / self.num_tokens_loaded - 1

    @property
    def comparison(self) -> str:
        """The loaded tokens, and the error of the estimate for the pool's real size, in a sentence."""
        loaded, error = f"{self.num_tokens_loaded} of {self.num_tokens_asked} tokens were loaded", self.error
        if error is None:
            text = f"{loaded}, so the error of the estimate is not known"
        elif abs(error) < _SMALL:
            text = f"{loaded}; the estimate for the pool's real size is equal within 0.1%"
        else:
            direction = "high" if error > 0 else "low"
            text = f"{loaded}; the estimate for the pool's real size is {abs(error):.1%} too {direction}"
        return text if self.one_of == 1 else f"{text}; one of {self.one_of} chunks was sampled"

    def with_other(self, other: Estimate) -> Estimate:
        """Return one estimate for the logs of both. If only one of the two has pool sizes, return it with a note."""
        if not self.sizes and not self.why_not:
            return other
        if not self.sizes or not other.sizes:
            known, unknown = (self, other) if self.sizes else (other, self)
            if not known.sizes:
                return known
            return attrs.evolve(known, note=f"logs without an estimate are left out: {unknown.why_not}")
        sizes = tuple(
            PoolSize(
                mine.factor,
                mine.num_slots if mine.num_slots == its.num_slots else None,
                mine.num_tokens_loaded + its.num_tokens_loaded,
            )
            for mine, its in zip(self.sizes, other.sizes, strict=True)
        )
        return Estimate(
            sizes,
            self.num_tokens_asked + other.num_tokens_asked,
            self.num_tokens_loaded + other.num_tokens_loaded,
            max(self.one_of, other.one_of),
            note=self.note or other.note,
        )
