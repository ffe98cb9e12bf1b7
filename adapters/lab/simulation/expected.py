"""What a request's tokens and KV must be, computed from its prompt alone, without any engine.

The model samples a function of the hash so far, so a prompt determines everything that follows it.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvledger.adapters.lab.simulation.tiny_model import VOCABULARY_SIZE

_MODULUS = (1 << 61) - 1


def chained_hash(previous: int, token: int) -> int:
    """The KV of a position, from the KV before it and its token."""
    return (previous * 1_000_003 + token + 17) % _MODULUS


def next_token(last_hash: int) -> int:
    """What the model samples after a position."""
    return last_hash % VOCABULARY_SIZE


class Expected:
    """Tokens and KV of one prompt, as far as anybody asked."""

    def __init__(self, prompt: Sequence[int], weights: int = 0) -> None:
        self.num_prompt_tokens = len(prompt)
        self.tokens = list(prompt)
        self.kv: list[int] = []
        """A hash for each position."""
        self._weights = weights

    def compute_to(self, num_tokens: int) -> None:
        """Know the KV of the first `num_tokens` positions, sampling what is not known yet."""
        while len(self.kv) < num_tokens:
            position = len(self.kv)
            previous = self.kv[-1] if self.kv else self._weights
            if position == len(self.tokens):
                self.tokens.append(next_token(previous))
            self.kv.append(chained_hash(previous, self.tokens[position]))

    def hashes(self, first: int, last: int) -> list[int]:
        """The KV of the positions from `first` to before `last`."""
        self.compute_to(last)
        return self.kv[first:last]

    def load_new_weights(self, weights: int, num_output_tokens: int) -> None:
        """The tokens so far stay; their KV, and what follows, are those of the new weights."""
        self.tokens = self.tokens[: self.num_prompt_tokens] + self.output(num_output_tokens)
        self.kv.clear()
        self._weights = weights

    def output(self, num_tokens: int) -> list[int]:
        """The first tokens that the model samples after the prompt."""
        last = self.num_prompt_tokens + num_tokens
        self.compute_to(last)
        return self.tokens[self.num_prompt_tokens : last]
