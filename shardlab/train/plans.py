"""Plans: what a training run and a timing are, for all ranks."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from shardlab.core.files import sha256_of_value
from shardlab.models.settings import Model
from shardlab.results.settings import Repetitions
from shardlab.results.timing_result import NO_COMMUNICATION
from shardlab.strategy.document import Strategy
from shardlab.strategy.sync import repetition_steps
from shardlab.train.settings import Train


@dataclass(frozen=True)
class RunPlan:
    """One run: a strategy with one seed."""

    run: str
    seed: int
    strategy: Strategy
    train: Train
    model: Model
    data: Path = Path("data")
    """folder with tokenizer.json, tokens/ and source.json"""

    def params_hash(self) -> str:
        """Return 16 hexadecimal digits of a hash over all parameters that the results depend on."""
        strategy = self.strategy.canonical().model_dump(mode="json")
        return sha256_of_value([strategy, self.train.meaning(), self.model.meaning()])[:16]


@dataclass(frozen=True)
class TimingPlan:
    """One timing: strategies, ranks and link, model and data."""

    name: str
    timing: Repetitions
    strategies: dict[str, Strategy]
    """at least those of the timing, by name"""
    train: Train
    """of the steps; ranks, link and, where it has one, `accumulation` are the timing's"""
    model: Model
    data: Path = field(default=Path("data"))
    """folder with tokens/"""
    kind: Literal["timing", "race"] = "timing"

    @property
    def runs(self) -> dict[str, Strategy]:
        """Strategies by name; the last is `NO_COMMUNICATION`."""
        named = {run: self.strategies[run] for run in self.timing.runs}
        return {**named, NO_COMMUNICATION: Strategy(engine="ddp")}

    def steps_of(self, run: str) -> int:
        """Return the steps of a repetition of a run."""
        runs = self.runs
        if self.timing.steps is not None and runs[run].sync is None:
            return self.timing.steps
        steps = repetition_steps([strategy.sync for strategy in runs.values()])
        return steps[[*runs].index(run)]

    @property
    def samples(self) -> Train:
        """`train` with the micro-batches of the timing."""
        accumulation = self.timing.accumulation or self.train.accumulation
        return self.train.model_copy(update={"accumulation": accumulation})
