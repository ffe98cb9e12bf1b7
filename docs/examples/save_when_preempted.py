"""A state handler of your own, as README.md shows it."""

from kvledger.lifecycle import StateHandler, handlers


class SaveWhenPreempted(handlers.Running):
    """Saves a decoding request when it loses its blocks or ends, not while it decodes."""

    tokens_settled = StateHandler.tokens_settled  # decides nothing
