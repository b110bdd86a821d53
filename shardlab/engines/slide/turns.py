"""Ranks that gather parameters on the device do so in one order."""

from shardlab.core.errors import UserError
from shardlab.engines.slide.control import Control

GATHERS = "gathers"
"""published by each rank of a node for a unit that it gathers next"""
ENDED = "ended"
"""published by each rank of a node when it has ended a backward pass"""
TURNS = "turns"
"""published by each rank of a node: how many of both there are so far"""


class GatherTurns:
    """The gathers of a node's ranks, and the ends of their backward passes, in one sequence.

    A gathering that another rank does not take part in would last until the timeout, and one of
    another unit there would mix up parameters: all ranks agree on each turn before it. Their
    numbers are published, so who asks late still finds what a turn was.

    One lane calls.
    """

    def __init__(self, control: Control) -> None:
        self._control = control
        self._number = self._agreed = 0

    def begin(self, event: str, unit: int = 0) -> None:
        """Tells the others what comes next.

        Raises:
            RuntimeError: the turn before has failed, so that this one is not the next.
        """
        if self._agreed < self._number:
            raise RuntimeError(f"turn {self._number} has failed")
        self._number += 1
        self._control.publish(event, unit, self._number)
        self._control.publish(TURNS, 0, self._number)  # who sees this sees what is above

    def agree(self, event: str, unit: int = 0) -> None:
        """Returns when the same comes next on all ranks.

        Raises:
            UserError: it does not.
        """
        self._control.wait(TURNS, 0, self._number)
        others = self._control.behind(event, unit, self._number)
        if others:
            raise UserError(
                f"slide: {others} uses other layers than this rank, or in another order, and with "
                "param_transfer: shard each gathers them from all: set param_transfer: full"
            )
        self._agreed = self._number
