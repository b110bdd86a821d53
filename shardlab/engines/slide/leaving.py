"""What ends with an engine."""

import os
import weakref
from collections.abc import Callable
from typing import ParamSpec

from shardlab.engines.slide.copies import Copies
from shardlab.engines.slide.faults import Faults
from shardlab.engines.slide.lending import Lent
from shardlab.engines.slide.moments import MomentStore
from shardlab.engines.slide.node import NodeMemory
from shardlab.engines.slide.ranks import Ranks
from shardlab.engines.slide.updates import Updates

P = ParamSpec("P")


def add_finalizer(
    engine: object, call: Callable[P, None], *args: P.args, **kwargs: P.kwargs
) -> None:
    """Calls when the engine is collected, or with the process; what is told last goes first.

    Not in a fork of the process, which has none of the threads that there are to wait for.
    """
    pid = os.getpid()

    def end() -> None:
        if os.getpid() == pid:
            call(*args, **kwargs)

    weakref.finalize(engine, end)


def leave(
    lent: Lent[Ranks],
    faults: Faults,
    updates: Updates,
    copies: Copies,
    moments: MomentStore,
    memory: NodeMemory,
) -> None:
    """In order, so that no rank takes this one for lost; all of it, whatever goes wrong."""
    told, errors = faults.told, []
    for end in (faults.check, updates.drain, copies.drain, moments.close, memory.close):
        try:
            end()
        except Exception as error:
            errors.append(error)
    if errors:
        lent.spoil()
        if not told:
            raise errors[0]
