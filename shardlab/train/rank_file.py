"""Files with the state of each rank: residuals, counters, events, ledger."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardlab.comm.handle import merge_states
from shardlab.core.files import finite, read_json, write_json
from shardlab.engines.base import State
from shardlab.engines.state_files import load_state, save_state
from shardlab.train.summary import mean_ledger, merge_events


@dataclass(frozen=True)
class RankState:
    """State, events and ledger of one rank."""

    state: State
    """`Engine.rank_state()` and, as `random`, the states of torch's generators"""
    events: list[dict[str, Any]]
    """of all steps so far"""
    ledger: dict[Any, dict[str, Any]]
    """of `Ledger.sums()`"""

    def write(self, folder: Path, rank: int) -> None:
        """Write the files into the folder of a checkpoint."""
        tensors, values = _paths(folder, rank)
        save_state(tensors, self.state)
        write_json(values, {"events": finite(self.events), "ledger": self.ledger})

    @classmethod
    def read(cls, folder: Path, rank: int) -> "RankState":
        """Read the files from a checkpoint."""
        tensors, values = _paths(folder, rank)
        state = {"communication": {}, "extra": {}, **load_state(tensors)}
        there = read_json(values)
        for event in there["events"]:
            for name in ("loss", "gradient_norm"):
                if event.get(name, 0.0) is None:
                    event[name] = math.nan
        return cls(state, **there)

    @classmethod
    def merged(cls, ranks: Sequence["RankState"]) -> "RankState":
        """Return events and ledger for another number of ranks: means, without state."""
        return cls(
            {},
            merge_events([each.events for each in ranks]),
            mean_ledger([each.ledger for each in ranks], 1),
        )


def merged_state(ranks: Sequence[RankState], world_size: int, rank: int) -> State:
    """Merge states for `Engine.load_rank_state()` of one rank of another number of ranks.

    Raises:
        UserError: there are residuals that cannot be merged.
    """
    states = [each.state["communication"] for each in ranks]
    communication = merge_states(states, world_size, rank)
    return {"communication": communication, "extra": ranks[0].state["extra"]}


def _paths(folder: Path, rank: int) -> tuple[Path, Path]:
    path = folder / f"rank-{rank:05d}.safetensors"
    return path, path.with_suffix(".json")
