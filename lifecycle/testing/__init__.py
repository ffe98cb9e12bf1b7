"""Contract tests to inherit: `HandlerContract` for a state handler, `ExtensionContract` for an extension.

Both run short scenarios. A scenario is a `Play`.
"""

from kvledger.lifecycle.testing.extensions import ExtensionContract
from kvledger.lifecycle.testing.handlers import HandlerContract
from kvledger.lifecycle.testing.plays import Play

__all__ = ["ExtensionContract", "HandlerContract", "Play"]
