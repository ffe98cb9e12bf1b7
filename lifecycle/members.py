"""Members of enumerations, at hand: Python 3.11 runs Python code to look one up as an attribute of its class.

From 3.12 on the members are the attributes themselves, as they are here. It is asked about directions, states and
reasons several times for every event, and each time it cost as much as the fold of a small one.
"""

from __future__ import annotations

import enum
from typing import TypeVar

_Enum = TypeVar("_Enum", bound=type[enum.Enum])


def members_at_hand(enum_class: _Enum) -> _Enum:
    """Let `enum_class.MEMBER` be a plain attribute. The members stay what they are."""
    for name, member in enum_class.__members__.items():
        type.__setattr__(enum_class, name, member)
    return enum_class
