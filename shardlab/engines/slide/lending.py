"""Process groups that the engines of one process use one after another.

What torch opens for a group stays open until all of its ranks end it at one time, and an engine is
collected whenever. Engines that are alive share none: their threads communicate in orders of their
own.
"""

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

from shardlab.engines.slide.groups import twin
from shardlab.transport.object_collectives import gather_values

Value = TypeVar("Value")


class Lent(Generic[Value]):
    """What one engine has at a time."""

    def __init__(self, value: Value, purpose: Hashable) -> None:
        self.value, self.purpose = value, purpose
        self.free = self._spoilt = False

    def give_back(self) -> None:
        """Nobody uses it any more."""
        self.free = not self._spoilt

    def spoil(self) -> None:
        """Nobody shall have it again: messages that were broken off may still arrive."""
        self._spoilt = True


_KEPT: WeakKeyDictionary[dist.ProcessGroup, list[Lent[Any]]] = WeakKeyDictionary()
"""what the ranks of a group have made, in the same order on all"""


def lend(group: dist.ProcessGroup, purpose: Hashable, make: Callable[[], Value]) -> Lent[Value]:
    """What was made for the purpose and is free on all ranks of the group, or a new one.

    Called by all ranks of the group together, with equal purposes.
    """
    kept = _KEPT.setdefault(group, [])
    free = [number for number, each in enumerate(kept) if each.free and each.purpose == purpose]
    everywhere = set(free).intersection(*gather_values(free, twin(group)))
    if everywhere:
        lent = kept[min(everywhere)]
        lent.free = False
    else:
        lent = Lent(make(), purpose)
        kept.append(lent)
    return lent
