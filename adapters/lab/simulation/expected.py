"""Computes the correct tokens and KV of a request from the request's prompt, without an engine.

The simulated model computes the next token from the hash of all tokens so far. A prompt therefore determines all tokens
that follow.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvledger.adapters.lab.simulation.tiny_model import VOCABULARY_SIZE

_MODULUS = (1 << 61) - 1


def chained_hash(previous: int, token: int) -> int:
    """Return the KV of a position, from the KV of the position before and the token at this position."""
    return (previous * 1_000_003 + token + 17) % _MODULUS


def next_token(last_hash: int) -> int:
    """Return the token that the model samples after the position whose KV is `last_hash`."""
    return last_hash % VOCABULARY_SIZE


class Expected:
    """The tokens and the KV of a request with this prompt, computed as far as needed."""

    def __init__(self, prompt: Sequence[int], weights: int = 0) -> None:
        self.num_prompt_tokens = len(prompt)
        self.tokens = list(prompt)
        self.kv: list[int] = []
        """One hash per position."""
        self._weights = weights

    def compute_to(self, num_tokens: int) -> None:
        """Compute the KV of the first `num_tokens` positions, and sample the tokens that are not known yet."""
        while len(self.kv) < num_tokens:
            position = len(self.kv)
            previous = self.kv[-1] if self.kv else self._weights
            if position == len(self.tokens):
                self.tokens.append(next_token(previous))
            self.kv.append(chained_hash(previous, self.tokens[position]))

    def hashes(self, first: int, last: int) -> list[int]:
        """Return the KV of the positions `first` to `last - 1`."""
        self.compute_to(last)
        return self.kv[first:last]

    def load_new_weights(self, weights: int, num_output_tokens: int) -> None:
        """Switch to new weights after `num_output_tokens` sampled tokens.

        The tokens up to there stay the same. The KV of all tokens, and all later tokens, come from the new weights.
        """
        self.tokens = self.tokens[: self.num_prompt_tokens] + self.output(num_output_tokens)
        self.kv.clear()
        self._weights = weights

    def output(self, num_tokens: int) -> list[int]:
        """Return the first `num_tokens` tokens that the model samples after the prompt."""
        last = self.num_prompt_tokens + num_tokens
        self.compute_to(last)
        return self.tokens[self.num_prompt_tokens : last]
