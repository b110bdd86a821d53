"""Costs of collectives and copies for a rank: on the calibrated machine, and on a cluster."""

from abc import ABC, abstractmethod
from copy import copy
from typing import NamedTuple

from shardlab.core.link import FRAME_HEADERS, bucket_bytes
from shardlab.predict.clusters import Cluster, collective_seconds
from shardlab.predict.coding import Coding, Levels
from shardlab.predict.machine import CodecLines, Machine, PhasedLines
from shardlab.results.calibration_record import MemoryOperation, Operation, wire_bytes

_PAYLOAD = 1448
"""payload bytes of a full Ethernet frame: 1500 less IP and TCP headers with time stamps"""
FRAMING = 1 + FRAME_HEADERS / _PAYLOAD
"""bytes on an emulated link per byte sent: it counts the headers of every frame"""


class Phase(NamedTuple):
    """Work of a lane that computes and sends concurrently, then waits."""

    cpu: float = 0.0
    """CPU seconds"""
    nbytes: float = 0.0
    """bytes through the link"""
    wait: float = 0.0
    """seconds of fixed latency afterwards"""
    collective: bool = False
    """whether ranks wait for each other before it"""


Phases = tuple[Phase, ...]


class Rank(NamedTuple):
    """Resources of one rank."""

    cores: float = 1.0
    """cores of this rank, possibly fractional; no phase uses more than one"""
    bytes_per_second: float = float("inf")
    """rate of the link"""
    bucket_s: float = 0.0
    """seconds of the link whose bytes pass at once after a pause: a token bucket (tc-tbf(8))"""


class Costs(ABC):
    """Phases of collectives on vectors, and of operations in host memory.

    An exchange moves a payload from every rank to every other one; the codec runs before and after
    (the scheme of `shardlab.comm`).
    """

    rank: Rank
    world_size: int
    ranks_per_node: int
    """ranks that share host memory"""
    launched_together: int
    """ranks that a launcher starts on one machine"""
    ranks_per_core = 1.0
    """ranks that share a core; 1 where every rank has one"""
    streams = False
    """whether collectives run on streams of devices, concurrently with computation"""
    sums_of_chunks: Operation = "reduce_scatter"
    """operation that sums chunks for their owners in a multi-phase method"""

    @abstractmethod
    def transfer(self, operation: Operation, nbytes: float) -> Phase:
        """Return one collective on a vector of so many bytes."""

    @abstractmethod
    def move(self, operation: MemoryOperation, nbytes: float) -> Phase:
        """Return an operation that moves so many bytes of host memory."""

    @abstractmethod
    def among(self, ranks: int, apart: int = 1) -> "Costs":
        """Return the costs between so many ranks, whose numbers differ by `apart`."""

    @property
    def inside(self) -> "Costs":
        """Costs between ranks that share host memory."""
        return self.among(min(self.ranks_per_node, self.world_size))

    @property
    def across(self) -> "Costs":
        """Costs between ranks of equal local rank on all nodes."""
        return self.among(-(-self.world_size // self.ranks_per_node), self.ranks_per_node)

    def gather(self, elements: float, coding: Coding) -> Phases:
        """Return the phases of an all-gather."""
        codec, ranks = _codec(elements, coding), self.world_size
        if ranks == 1:
            return ()
        if codec is None:
            return (self.transfer("gather", elements * coding.element_bytes),)
        return self._coded(codec, elements / ranks, 1, ("gather",), ranks)

    def reduce_scatter(self, elements: float, coding: Coding) -> Phases:
        """Return the phases of a reduce-scatter."""
        codec, ranks = _codec(elements, coding), self.world_size
        if ranks == 1:
            return ()
        if coding.phased is not None and elements >= coding.minimum_size:
            return self._in_phases(elements, coding.phased["reduce_scatter"])
        way: Operation = "reduce_scatter" if coding.native else "exchange"
        if codec is None:
            return (self.transfer(way, elements * coding.element_bytes),)
        # the group's own collective sums payloads, of which one is left to decode
        received = 1 if coding.native else ranks
        return self._coded(codec, elements / ranks, ranks, (way,), received)

    def all_reduce(self, elements: float, coding: Coding) -> Phases:
        """Return the phases of an all-reduce."""
        codec, ranks = _codec(elements, coding), self.world_size
        if ranks == 1:
            return ()
        if coding.phased is not None and elements >= coding.minimum_size:
            return self._in_phases(elements, coding.phased["all_reduce"])
        if codec is None and (coding.native or coding.phased is not None):
            return (self.transfer("all_reduce", elements * coding.element_bytes),)
        if codec is None or not coding.summable:
            return self.reduce_scatter(elements, coding) + self.gather(elements, coding)
        ways: tuple[Operation, ...] = ("all_reduce",) if coding.native else ("exchange", "gather")
        return self._coded(codec, elements / ranks, ranks, ways, ranks)

    def sum_scatter(self, elements: float, levels: Levels) -> Phases:
        """Return the phases of a reduce-scatter of gradients: inside nodes, then between them."""
        if levels.between is None:
            return self.reduce_scatter(elements, levels.inside)
        node, nodes = self._two_levels(levels)
        inside = node.reduce_scatter(elements, levels.inside)
        return inside + nodes.reduce_scatter(elements / node.world_size, levels.between)

    def sum_whole(self, elements: float, levels: Levels) -> Phases:
        """Return the phases of an all-reduce of gradients."""
        if levels.between is None:
            return self.all_reduce(elements, levels.inside)
        node, nodes = self._two_levels(levels)
        gathered = nodes.gather(elements / node.world_size, levels.between)
        gathered += node.gather(elements, levels.inside)
        return self.sum_scatter(elements, levels) + gathered

    def _two_levels(self, levels: Levels) -> tuple["Costs", "Costs"]:
        """Return the costs within a node of two levels and between such nodes."""
        node = min(levels.ranks_per_node or self.launched_together, self.world_size)
        return self.among(node), self.among(self.world_size // node, node)

    def _coded(
        self,
        codec: CodecLines,
        elements: float,
        encoded: int,
        ways: tuple[Operation, ...],
        decoded: int,
    ) -> Phases:
        """Return the phases of payloads of so many elements that are encoded, sent and decoded."""
        ranks = self.world_size
        # the bytes of payloads are exchanged before payloads whose size varies
        sizes = (self.transfer("exchange", 8 * ranks),) if codec.variable else ()
        return (
            Phase(encoded * codec.encode.at(elements)),
            *sizes,
            *(self.transfer(way, ranks * codec.payload.at(elements)) for way in ways),
            Phase(decoded * codec.decode.at(elements)),
        )

    def _in_phases(self, elements: float, lines: PhasedLines) -> Phases:
        """Return the phases of a multi-phase method, whose computation comes first."""
        ways = {"reduce_scatter": self.sums_of_chunks}
        sent = (
            self.transfer(ways.get(way, way), size.at(elements)) for way, size in lines.messages
        )
        return (Phase(lines.seconds.at(elements)), *sent)


def _codec(elements: float, coding: Coding) -> CodecLines | None:
    return None if elements < coding.minimum_size else coding.codec


class MeasuredCosts(Costs):
    """The machine of a calibration, with gloo: its ranks share its cores.

    Args:
        cores: of the machine.
        bits_per_second: of the link; None: loopback.
        delay_s: latency of each operation between nodes.
        ranks_per_node: those that share a link which the kernel emulates: bytes are sent in
            Ethernet frames, and a token bucket passes at once after a pause. None: every rank
            emulates its own.
    """

    sums_of_chunks = "exchange"  # gloo's reduce-scatter would send twice as much

    def __init__(
        self,
        machine: Machine,
        world_size: int,
        cores: float,
        bits_per_second: int | None = None,
        delay_s: float = 0.0,
        ranks_per_node: int | None = 1,
    ) -> None:
        self._machine, self._delay_s = machine, delay_s
        # links are emulated between ranks of one machine, which the launcher divides into nodes
        # where these have several
        self.world_size = self.ranks_per_node = self.launched_together = world_size
        self.ranks_per_core = max(1.0, world_size / cores)
        rate, bucket, self._framing = float("inf"), 0.0, 1.0
        self._sharing = self._together = 1
        if bits_per_second is not None:
            rate = bits_per_second / 8
            if ranks_per_node is not None:
                self.ranks_per_node = self._sharing = self._together = ranks_per_node
                bucket, self._framing = bucket_bytes(bits_per_second) / rate, FRAMING
                if ranks_per_node > 1:
                    self.launched_together = ranks_per_node
        self.rank = Rank(cores / world_size, rate, bucket)

    def transfer(self, operation: Operation, nbytes: float) -> Phase:  # noqa: D102
        wire, peers = wire_bytes(operation, nbytes, self.world_size), self.world_size - 1
        cpu = peers * self._machine.transport[operation].at(wire / peers)
        leaving = self._leaving(operation)
        nbytes = self._framing * leaving * self._sharing * wire
        return Phase(cpu, nbytes, self._delay_s if leaving else 0.0, collective=True)

    def move(self, operation: MemoryOperation, nbytes: float) -> Phase:  # noqa: D102
        return Phase(self._machine.memory[operation].at(nbytes))

    def among(self, ranks: int, apart: int = 1) -> Costs:  # noqa: D102
        some = copy(self)
        some.world_size = ranks
        some._together = max(1, self._together // apart)  # noqa: SLF001 - a copy of this
        return some

    def _leaving(self, operation: Operation) -> float:
        """Return the fraction of a rank's bytes that pass the link, mean over the ranks of a node,
        which send at once: `shardlab.comm.ledger.shares_between_nodes`."""
        ranks, together = self.world_size, self._together
        if together >= ranks:
            return 0.0
        if operation in ("all_reduce", "reduce_scatter"):
            return 1 / together  # a ring, where one rank of each node sends to the next node
        return (ranks - together) / (ranks - 1)


class OnCluster(Costs):
    """Costs on a cluster, by closed forms: collectives in flight share the network."""

    # the unit of "bytes" on this link is seconds: the time that an operation takes alone
    rank = Rank(bytes_per_second=1.0)

    def __init__(self, cluster: Cluster, world_size: int, streams: bool = False) -> None:
        self._cluster, self.world_size, self.streams = cluster, world_size, streams
        self.ranks_per_node = self.launched_together = cluster.ranks_per_node

    def transfer(self, operation: Operation, nbytes: float) -> Phase:  # noqa: D102
        seconds = collective_seconds(operation, nbytes, self.world_size, self._cluster)
        return Phase(self._cluster.busy * seconds, seconds, collective=True)

    def move(self, operation: MemoryOperation, nbytes: float) -> Phase:  # noqa: D102
        # the update uses no core that trains
        rate = self._cluster.copies if operation == "copy" else self._cluster.memory
        return Phase(wait=nbytes / rate)

    def among(self, ranks: int, apart: int = 1) -> Costs:  # noqa: D102
        together = self._cluster.ranks_per_node // apart
        if together > 1:
            return OnCluster(self._cluster._replace(ranks_per_node=together), ranks, self.streams)
        return OnCluster(self._cluster.across(), ranks, self.streams)
