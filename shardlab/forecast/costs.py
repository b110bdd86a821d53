"""Costs of collectives, copies and updates for a rank: on a measured machine, and on a cluster."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy

from shardlab.config.calibration_record import MemoryOperation, Operation, wire_bytes
from shardlab.forecast import collectives
from shardlab.forecast.coding import Coding, Levels
from shardlab.forecast.machine import CodecLines, Machine, PhasedLines, framing
from shardlab.forecast.presets import Cluster
from shardlab.forecast.schedule import Phase, Rank, Task, duration, simulate


class Costs(ABC):
    """Phases of collectives on vectors of given size, and of operations in host memory.

    An exchange moves a payload from every rank to every other one; the codec runs before and after
    (the scheme of `shardlab.comm.all_to_all`).
    """

    ranks_per_core = 1.0
    """ranks that share a core; 1 where every rank has one"""

    sums_of_chunks: Operation = "reduce_scatter"
    """operation that sums chunks for their owners in a multi-phase method"""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    @property
    @abstractmethod
    def rank(self) -> Rank:
        """Resources of a rank that run the phases."""

    @abstractmethod
    def transfer(self, operation: Operation, nbytes: float) -> Phase:
        """Return one operation on a vector of so many bytes."""

    @abstractmethod
    def move(self, operation: MemoryOperation, nbytes: float) -> Phase:
        """Return an operation that moves so many bytes of host memory."""

    @abstractmethod
    def collect(self, nbytes: float) -> Phase:
        """Return a copy within the device."""

    @property
    @abstractmethod
    def inside(self) -> "Costs":
        """Costs between ranks that share host memory."""

    @property
    @abstractmethod
    def across(self) -> "Costs":
        """Costs between ranks of equal local rank on all nodes."""

    @abstractmethod
    def among(self, ranks: int, apart: int = 1) -> "Costs":
        """Costs between so many ranks, whose numbers differ by `apart`."""

    def alone(self, phases: Sequence[Phase]) -> float:
        """Return the seconds of phases that run one after another, and nothing beside them."""
        return duration(simulate([Task("one", "one", tuple(phases))], self.rank))

    def gather(self, elements: float, coding: Coding) -> tuple[Phase, ...]:
        """Return the phases of an all-gather."""
        if self.world_size == 1:
            return ()
        codec = self._codec(elements, coding)
        if codec is None:
            return (self.transfer("gather", elements * coding.element_bytes),)
        each = elements / self.world_size
        return (
            Phase(codec.encode.at(each)),
            *self._sizes(codec),
            self.transfer("gather", self.world_size * codec.payload.at(each)),
            Phase(self.world_size * codec.decode.at(each)),
        )

    def reduce_scatter(self, elements: float, coding: Coding) -> tuple[Phase, ...]:
        """Return the phases of a reduce-scatter."""
        if self.world_size == 1:
            return ()
        if coding.phased is not None and elements >= coding.minimum_size:
            return self._in_phases(elements, coding.phased["reduce_scatter"])
        way: Operation = "reduce_scatter" if coding.native else "exchange"
        codec = self._codec(elements, coding)
        if codec is None:
            return (self.transfer(way, elements * coding.element_bytes),)
        each = elements / self.world_size
        # the group's own collective sums payloads, of which one is left to decode
        received = 1 if coding.native else self.world_size
        return (
            Phase(self.world_size * codec.encode.at(each)),
            *self._sizes(codec),
            self.transfer(way, self.world_size * codec.payload.at(each)),
            Phase(received * codec.decode.at(each)),
        )

    def all_reduce(self, elements: float, coding: Coding) -> tuple[Phase, ...]:
        """Return the phases of an all-reduce."""
        if self.world_size == 1:
            return ()
        if coding.phased is not None and elements >= coding.minimum_size:
            return self._in_phases(elements, coding.phased["all_reduce"])
        codec = self._codec(elements, coding)
        if codec is None and (coding.native or coding.phased is not None):
            return (self.transfer("all_reduce", elements * coding.element_bytes),)
        if codec is None or not coding.summable:
            return self.reduce_scatter(elements, coding) + self.gather(elements, coding)
        each = elements / self.world_size
        ways: tuple[Operation, ...] = ("all_reduce",) if coding.native else ("exchange", "gather")
        return (
            Phase(self.world_size * codec.encode.at(each)),
            *(self.transfer(way, self.world_size * codec.payload.at(each)) for way in ways),
            Phase(self.world_size * codec.decode.at(each)),
        )

    def sum_scatter(self, elements: float, levels: Levels) -> tuple[Phase, ...]:
        """Return the phases of a reduce-scatter of gradients: inside nodes, then between them."""
        if levels.between is None:
            return self.reduce_scatter(elements, levels.inside)
        node, nodes = self._nodes(levels)
        inside = node.reduce_scatter(elements, levels.inside)
        return inside + nodes.reduce_scatter(elements / node.world_size, levels.between)

    def sum_whole(self, elements: float, levels: Levels) -> tuple[Phase, ...]:
        """Return the phases of an all-reduce of gradients."""
        if levels.between is None:
            return self.all_reduce(elements, levels.inside)
        node, nodes = self._nodes(levels)
        gathered = nodes.gather(elements / node.world_size, levels.between)
        gathered += node.gather(elements, levels.inside)
        return self.sum_scatter(elements, levels) + gathered

    def _nodes(self, levels: Levels) -> tuple["Costs", "Costs"]:
        """Return the costs within a node of two levels and between such nodes."""
        node = min(levels.ranks_per_node or self.launched_together, self.world_size)
        return self.among(node), self.among(self.world_size // node, node)

    @property
    @abstractmethod
    def launched_together(self) -> int:
        """Ranks that a launcher starts on one machine."""

    def _in_phases(self, elements: float, lines: PhasedLines) -> tuple[Phase, ...]:
        """Return the phases of a multi-phase method, whose computation comes first."""
        sent = [
            self.transfer(
                self.sums_of_chunks if way == "reduce_scatter" else way, size.at(elements)
            )
            for way, size in lines.messages
        ]
        return (Phase(lines.seconds.at(elements)), *sent)

    def _sizes(self, codec: CodecLines) -> tuple[Phase, ...]:
        """Return the exchange of the bytes of payloads, which comes before that of payloads."""
        return (self.transfer("exchange", 8 * self.world_size),) if codec.variable else ()

    def _codec(self, elements: float, coding: Coding) -> CodecLines | None:
        return None if elements < coding.minimum_size else coding.codec


class Measured(Costs):
    """The machine of a calibration, with gloo: its ranks share its cores.

    Args:
        cores: of the machine.
        bits_per_second: of the link; None: loopback.
        delay_s: latency of each operation.
        bucket: bytes that pass the link at once after a pause.
        framed: whether bytes are sent in Ethernet frames; then every rank is a node.
    """

    sums_of_chunks = "exchange"  # gloo's reduce-scatter would send twice as much

    def __init__(
        self,
        machine: Machine,
        world_size: int,
        cores: float,
        bits_per_second: int | None = None,
        delay_s: float = 0.0,
        bucket: float = 0.0,
        framed: bool = True,
    ) -> None:
        super().__init__(world_size)
        self._machine = machine
        self._apart = framed and bits_per_second is not None
        self._delay_s = delay_s
        self._framing = framing(bits_per_second) if framed and bits_per_second else 1.0
        rate = float("inf") if bits_per_second is None else bits_per_second / 8
        self._rank = Rank(cores / world_size, rate, bucket)
        self.ranks_per_core = max(1.0, world_size / cores)

    @property
    def rank(self) -> Rank:  # noqa: D102
        return self._rank

    def transfer(self, operation: Operation, nbytes: float) -> Phase:  # noqa: D102
        wire, peers = wire_bytes(operation, nbytes, self.world_size), self.world_size - 1
        line = self._machine.transport[operation]
        cpu = peers * line.at(wire / peers)
        return Phase(cpu, self._framing * wire, self._delay_s, operation, nbytes)

    def move(self, operation: MemoryOperation, nbytes: float) -> Phase:  # noqa: D102
        return Phase(self._machine.memory[operation].at(nbytes))

    def collect(self, nbytes: float) -> Phase:  # noqa: D102
        return Phase(self._machine.memory["copy"].at(nbytes))

    @property
    def inside(self) -> Costs:  # noqa: D102
        return self.among(1) if self._apart else self

    @property
    def across(self) -> Costs:  # noqa: D102
        return self if self._apart else self.among(1)

    def among(self, ranks: int, apart: int = 1) -> Costs:  # noqa: D102
        some = copy(self)
        some.world_size = ranks
        return some

    @property
    def launched_together(self) -> int:  # noqa: D102
        return self.world_size  # links are emulated between ranks of one machine


class OnCluster(Costs):
    """Costs on a cluster by formulas: concurrent operations take as long as consecutive ones."""

    def __init__(self, cluster: Cluster, world_size: int) -> None:
        super().__init__(world_size)
        self._cluster = cluster

    @property
    def rank(self) -> Rank:  # noqa: D102
        # the unit of "bytes" on this link is seconds: the time that an operation takes alone
        return Rank(bytes_per_second=1.0)

    def transfer(self, operation: Operation, nbytes: float) -> Phase:  # noqa: D102
        way = {
            "exchange": collectives.all_to_all,
            "gather": collectives.gather_or_scatter,
            "reduce_scatter": collectives.gather_or_scatter,
            "all_reduce": collectives.all_reduce,
        }[operation]
        seconds = way(nbytes, self.world_size, self._cluster)
        return Phase(self._cluster.busy * seconds, seconds, 0.0, operation, nbytes)

    def move(self, operation: MemoryOperation, nbytes: float) -> Phase:  # noqa: D102
        cluster = self._cluster
        rates = {"copy": cluster.copies, "update": cluster.memory}
        # the update uses no core that trains
        return Phase(wait=nbytes / rates.get(operation, cluster.disk))

    def collect(self, nbytes: float) -> Phase:  # noqa: D102
        return Phase()  # negligible at device memory bandwidth

    @property
    def inside(self) -> Costs:  # noqa: D102
        return OnCluster(self._cluster, min(self._cluster.ranks_per_node, self.world_size))

    @property
    def across(self) -> Costs:  # noqa: D102
        return OnCluster(self._cluster.across(), self._cluster.nodes(self.world_size))

    def among(self, ranks: int, apart: int = 1) -> Costs:  # noqa: D102
        together = self._cluster.ranks_per_node // apart
        if together > 1:
            return OnCluster(self._cluster._replace(ranks_per_node=together), ranks)
        return OnCluster(self._cluster.across(), ranks)

    @property
    def launched_together(self) -> int:  # noqa: D102
        return self._cluster.ranks_per_node
