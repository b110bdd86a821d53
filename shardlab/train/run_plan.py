"""Plan of one training run."""

from dataclasses import dataclass
from pathlib import Path

from shardlab.config.model_and_data import Model
from shardlab.config.schema import Train
from shardlab.config.strategy import Strategy
from shardlab.core.files import sha256_of_value


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
        strategy, model = (
            document.model_dump(mode="json") for document in (self.strategy.canonical(), self.model)
        )
        return sha256_of_value([strategy, self.train.meaning(), model])[:16]
