"""Tests that ship, for others to inherit.

`HandlerContract` for a state handler, `ExtensionContract` for an extension, and `Play`, by which both are tried.
"""

from kvledger.lifecycle.testing.extensions import ExtensionContract
from kvledger.lifecycle.testing.handlers import HandlerContract
from kvledger.lifecycle.testing.plays import Play

__all__ = ["ExtensionContract", "HandlerContract", "Play"]
