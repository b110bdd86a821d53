"""Costs that tests can calculate with."""

from shardlab.config.calibration_record import MemoryOperation, Operation
from shardlab.forecast.costs import Costs
from shardlab.forecast.schedule import Phase, Rank


class Timed(Costs):
    """Every collective takes the same time, and nothing is shared.

    Args:
        per_byte: seconds of what moves memory; nothing by default.
    """

    def __init__(self, seconds: float, world_size: int = 2, **per_byte: float) -> None:
        super().__init__(world_size)
        self.seconds, self.per_byte = seconds, per_byte

    @property
    def rank(self) -> Rank:
        return Rank(9.0)

    def transfer(self, operation: Operation, nbytes: float) -> Phase:
        return Phase(0.0, 0.0, self.seconds, operation, nbytes)

    def move(self, operation: MemoryOperation, nbytes: float) -> Phase:
        return Phase(wait=nbytes * self.per_byte.get(operation, 0.0), vector_bytes=nbytes)

    def collect(self, nbytes: float) -> Phase:
        return Phase()

    @property
    def inside(self) -> Costs:
        return self

    @property
    def across(self) -> Costs:
        return Timed(self.seconds, 1, **self.per_byte)

    def among(self, ranks: int, apart: int = 1) -> Costs:
        return Timed(self.seconds, ranks, **self.per_byte)

    @property
    def launched_together(self) -> int:
        return self.world_size
