"""Plan of a timing or a race."""

from dataclasses import dataclass, field
from pathlib import Path

from shardlab.config.model_and_data import Model
from shardlab.config.schema import Repetitions, Train
from shardlab.config.strategy import Strategy
from shardlab.config.timing_record import NO_COMMUNICATION


@dataclass(frozen=True)
class TimingPlan:
    """One timing: strategies, ranks and link, model and data."""

    name: str
    timing: Repetitions
    strategies: dict[str, Strategy]
    """at least those of the timing, by name"""
    train: Train
    """of the steps; ranks and link are the timing's"""
    model: Model
    data: Path = field(default=Path("data"))
    """folder with tokens/"""

    @property
    def runs(self) -> dict[str, Strategy]:
        """Strategies by name; the last is `NO_COMMUNICATION`."""
        named = {run: self.strategies[run] for run in self.timing.runs}
        return {**named, NO_COMMUNICATION: Strategy(engine="ddp")}
