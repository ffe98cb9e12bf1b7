"""What a request's tokens and KV must be, computed from its prompt alone, without any engine.

The model samples a function of the hash so far, so a prompt determines everything that follows it.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvledger.adapters.simulation.hashed_model import chained_hash, next_token


class Truth:
    """Tokens and KV of one prompt, as far as anybody asked."""

    def __init__(self, prompt: Sequence[int], weights: int = 0) -> None:
        self._weights = weights
        self.num_prompt_tokens = len(prompt)
        self._tokens = list(prompt)
        self._hashes: list[int] = []

    def hashes(self, first: int, last: int) -> list[int]:
        """The KV of the positions from `first` to before `last`."""
        while len(self._hashes) < last:
            position = len(self._hashes)
            previous = self._hashes[-1] if self._hashes else self._weights
            if position == len(self._tokens):
                self._tokens.append(next_token(previous))
            self._hashes.append(chained_hash(previous, self._tokens[position]))
        return self._hashes[first:last]

    def load_new_weights(self, weights: int, num_output_tokens: int) -> None:
        """What was said so far stays said; its KV, and what follows, are those of the new weights."""
        self._tokens = self._tokens[: self.num_prompt_tokens] + self.output(num_output_tokens)
        self._hashes.clear()
        self._weights = weights

    def output(self, num_tokens: int) -> list[int]:
        """The first tokens that the model says after the prompt."""
        last = self.num_prompt_tokens + num_tokens
        self.hashes(0, last)
        return self._tokens[self.num_prompt_tokens : last]
