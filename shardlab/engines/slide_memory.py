"""Host memory of the `slide` engine: the ranks of a node, memory that they share, units in it."""

import mmap
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardlab.codecs.unit import Block, Unit
from shardlab.comm.hierarchy import subgroup, timeout_of
from shardlab.comm.layout import REPLICAS
from shardlab.comm.object_collectives import gather_values, run_or_fail_together
from shardlab.config.strategy import CanonicalStrategy
from shardlab.core.errors import UserError
from shardlab.core.host import free_memory_bytes
from shardlab.engines.flat import REPLICATE, SHARD, named_parts
from shardlab.engines.scheduling import ParameterUnit

Layout = dict[str, tuple[torch.dtype, int]]
"""type and number of elements of vectors, by name"""
KINDS = ("exp_avg", "exp_avg_sq")
"""the moments of AdamW"""
FROZEN = "frozen"
"""the vector of parameters that are not trained"""

_SHARED = Path("/dev/shm")
_GIB = 1 << 30


@dataclass(frozen=True)
class RankGroups:
    """The process groups of a `slide` engine; each thread communicates over groups of its own."""

    here: dist.ProcessGroup
    """the ranks of the node, for the training thread"""
    across: dist.ProcessGroup | None
    """those that update the same chunk on other nodes, where there are any"""
    updates: dist.ProcessGroup
    """of the node, for the thread of updates"""
    gathers: dist.ProcessGroup | None
    """of the node, for parameters on the device; None: every rank loads whole units"""
    order: dist.ProcessGroup | None
    """of gloo, with `gathers`: ranks agree on the unit that they gather next"""
    reductions: dist.ProcessGroup | None
    """of the node, for messages with gradients; None: ranks sum vectors in shared memory"""
    mesh: DeviceMesh
    """[ranks] or [nodes, ranks], of host memory"""

    @property
    def rank(self) -> int:
        """This rank, among those of its node."""
        return dist.get_rank(self.here)

    @property
    def world_size(self) -> int:
        """Number of ranks of the node."""
        return dist.get_world_size(self.here)

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return 1 if self.across is None else dist.get_world_size(self.across)

    @property
    def sums(self) -> bool:
        """Return whether an update adds up the gradients of all ranks of the node."""
        return self.world_size > 1 and self.reductions is None


def make_groups(
    strategy: CanonicalStrategy, group: dist.ProcessGroup, ranks_per_node: int | None = None
) -> RankGroups:
    """Create the groups that a strategy needs; all ranks of the group call together.

    Args:
        strategy: in its canonical form.
        ranks_per_node: see `node_groups`.

    Raises:
        UserError: see `node_groups`; or the ranks of a node are not consecutive.
    """
    here, across = node_groups(group, ranks_per_node)
    mesh = _mesh(group, here, across)
    members = dist.get_process_group_ranks(here)
    gathers = order = reductions = None
    updates = subgroup(group, members, "gloo")
    if len(members) > 1:
        if strategy.param_transfer == "shard":
            gathers, order = subgroup(group, members), subgroup(group, members, "gloo")
        if strategy.grad_sync == "gpu_reduce":
            reductions = subgroup(group, members)
        elif strategy.gradients.route != "native" or not strategy.gradients.plain():
            reductions = updates  # the same thread sends them
    return RankGroups(here, across, updates, gathers, order, reductions, mesh)


def gloo_group(group: dist.ProcessGroup, timeout: timedelta | None = None) -> dist.ProcessGroup:
    """Return a new gloo group of the same ranks; by default with the timeout of the group."""
    ranks = dist.get_process_group_ranks(group)
    wait = timeout or timeout_of(group)
    created: dist.ProcessGroup = dist.new_group(ranks, wait, "gloo", use_local_synchronization=True)
    return created


def _mesh(
    group: dist.ProcessGroup, here: dist.ProcessGroup, across: dist.ProcessGroup | None
) -> DeviceMesh:
    ranks, size = dist.get_process_group_ranks(group), dist.get_world_size(here)
    node = dist.get_rank(group) // size
    if dist.get_process_group_ranks(here) != ranks[node * size : (node + 1) * size]:
        raise UserError("slide: ranks of one node must follow each other: number them by node")
    if across is None:
        return DeviceMesh.from_group(here, "cpu", mesh_dim_names=(SHARD,))
    nodes = torch.tensor(ranks).view(-1, size)
    names = REPLICATE, SHARD
    return DeviceMesh.from_group([across, here], "cpu", mesh=nodes, mesh_dim_names=names)


def node_groups(
    group: dist.ProcessGroup, ranks_per_node: int | None = None
) -> tuple[dist.ProcessGroup, dist.ProcessGroup | None]:
    """Return two gloo groups of this rank; all ranks of the group call together.

    The first has the ranks of its node. The second has the ranks at the same position of every
    node, in order; None where there is one node.

    Args:
        ranks_per_node: so many consecutive ranks are a node. By default the ranks of one machine
            are, but for those that containers or emulated links separate.

    Raises:
        UserError: nodes have different numbers of ranks.
    """
    ranks, rank = dist.get_process_group_ranks(group), dist.get_rank(group)
    everyone = gloo_group(group)
    keys = gather_values(rank // ranks_per_node if ranks_per_node else _node_key(), everyone)
    nodes: dict[object, list[int]] = {}
    for number, key in zip(ranks, keys, strict=True):
        nodes.setdefault(key, []).append(number)
    if len({*map(len, nodes.values())}) > 1:
        listed = ", ".join(str(len(node)) for node in nodes.values())
        raise UserError(f"slide: nodes of {listed} ranks: start equally many on each")
    if len(nodes) == 1:
        return everyone, None
    here = nodes[keys[rank]]
    position = here.index(ranks[rank])
    across = [node[position] for node in nodes.values()]
    return subgroup(group, here, "gloo"), subgroup(group, across, "gloo")


def _node_key() -> str:
    """Return a key of ranks that see one /dev/shm and one network: emulated links move threads."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    network = Path("/proc/thread-self/ns/net").stat().st_ino
    return f"{boot} {_SHARED.stat().st_dev} {network}"


def shared_vectors(
    layout: Layout, group: dist.ProcessGroup, unshared_bytes: int = 0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return zeroed vectors that all ranks of a node map; all call together, with equal arguments.

    They lie in a file in /dev/shm, which is unlinked when all ranks have mapped it, so that the
    memory is gone with the last process, however that ends. Each rank allocates one of W equal
    parts of each vector: a page lies on the NUMA node of the CPU that allocates it.

    Args:
        unshared_bytes: that the ranks will allocate for themselves, which have to fit, too.

    Returns:
        the whole memory, uint8, and the vectors by name, each of which begins a page.

    Raises:
        UserError: (on all ranks) there is too little memory, or the ranks cannot share it.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    places: dict[str, tuple[int, int]] = {}
    total = 0
    for name, (dtype, elements) in layout.items():
        size = elements * dtype.itemsize
        places[name] = total, size
        total += -(-size // mmap.PAGESIZE) * mmap.PAGESIZE

    def create() -> str | None:
        if rank > 0:
            return None
        _check_free(total, unshared_bytes)
        descriptor, name = tempfile.mkstemp(prefix=f"shardlab-{os.getpid()}-", dir=_SHARED)
        os.ftruncate(descriptor, total)
        os.close(descriptor)
        return name

    def map_file() -> Tensor:
        try:
            with path.open("r+b") as file:
                for start, size in places.values():
                    first, last = (start + size * r // world_size for r in (rank, rank + 1))
                    if first < last:  # a page that is missing at its use would end the process
                        os.posix_fallocate(file.fileno(), first, last - first)
        except OSError as error:
            raise _too_little(total, f"{_SHARED}: {(error.strerror or '').lower()}") from error
        return torch.from_file(str(path), shared=True, size=total, dtype=torch.uint8)

    if world_size == 1:
        _check_free(total, unshared_bytes)
        return _views(torch.zeros(total, dtype=torch.uint8), layout, places)
    failed = "slide: the ranks of a node cannot share host memory"
    path = Path(gather_values(run_or_fail_together(group, failed, create), group)[0])
    try:
        memory = run_or_fail_together(group, failed, map_file)
    finally:
        if rank == 0:
            path.unlink()
    return _views(memory, layout, places)


def _views(
    memory: Tensor, layout: Layout, places: Mapping[str, tuple[int, int]]
) -> tuple[Tensor, dict[str, Tensor]]:
    return memory, {
        name: memory[start : start + size].view(layout[name][0])
        for name, (start, size) in places.items()
    }


def _check_free(total: int, unshared: int) -> None:
    if (free := free_memory_bytes()) < total + unshared:
        raise _too_little(total, f"only {free / _GIB:.2f} GiB are free", unshared)


def _too_little(total: int, why: str, unshared: int = 0) -> UserError:
    more = f" and each takes its own, together {unshared / _GIB:.2f} GiB" if unshared else ""
    return UserError(
        f"slide: the ranks of a node share {total / _GIB:.2f} GiB of host memory, and {why}{more}: "
        "take a smaller model, states of fewer bits or more nodes, or enlarge /dev/shm (docker run "
        "--shm-size)"
    )


class Precision(NamedTuple):
    """Types of a unit's vectors other than the float32 parameters."""

    compute: torch.dtype
    """of the parameters on the device"""
    offload: torch.dtype
    """of gradients that are copied to host memory"""
    moments: torch.dtype


class SlideUnit(ParameterUnit):
    """Some parameters as one vector: the trained ones, 1/W by each rank of a node, then the frozen.

    In each part the parameters lie one after another, then zeros up to W equal chunks. Host memory,
    which the ranks share, holds the trained part in float32, its moments, and a mirror of it in the
    compute type where that is narrower. It holds the frozen part once, in the compute type, right
    behind that version of the trained part which goes to the device: one copy takes both.

    Outside of its use a parameter has no memory on the device: every element of it is NaN, so that
    a use at the wrong time shows.

    Args:
        index: in the order of use; the root comes first.
        parameters: by name; with their shapes, but not yet their values. Those whose
            `requires_grad` is False stay frozen.
        rank, world_size: among the ranks of the node.
    """

    def __init__(
        self,
        index: int,
        name: str,
        parameters: Mapping[str, nn.Parameter],
        rank: int,
        world_size: int,
        precision: Precision,
    ) -> None:
        self.index = index
        self.shapes = {n: p.shape for n, p in parameters.items() if p.requires_grad}
        """of trained parameters"""
        self.frozen_shapes = {n: p.shape for n, p in parameters.items() if not p.requires_grad}
        names = (*self.shapes, *self.frozen_shapes)
        super().__init__(name, {n: parameters[n] for n in names})
        self.count = _elements(self.shapes)
        """trained elements, without the zeros at the end"""
        self.chunk = -(-self.count // world_size)
        self.size = world_size * self.chunk
        """elements of the trained part"""
        self.whole = self.size + world_size * -(-_elements(self.frozen_shapes) // world_size)
        """elements of both parts"""
        self.first = rank * self.chunk
        self.shard = slice(self.first, self.first + self.chunk)
        """the chunk that this rank updates"""
        self.precision = precision
        self.message = Unit(name, (Block(name, self.count, 1),))
        """the trained part"""
        self.message_of_both = Unit(name, (Block(name, self.whole, 1),))
        self.between_nodes = Unit(name + REPLICAS, (Block(name, self.chunk, 1),))
        self.step = torch.zeros(())
        """updates so far, continued from a checkpoint"""
        self.updates = 0
        """that this process has begun"""
        self._rank, self._world_size = rank, world_size
        self._views: dict[int, list[Tensor]] = {}
        """the parameters in vectors on the device, by their addresses"""
        self._nan: list[Tensor] = []
        """the parameters outside of their use"""
        self.vectors: dict[str, Tensor] = {}
        """whole: `parameter`, `exp_avg`, `exp_avg_sq`, `frozen`, perhaps `mirror`"""
        self.source = torch.empty(0)
        """both parts of what goes to the device"""

    @property
    def narrow(self) -> bool:
        """Return whether the device computes with a mirror."""
        return self.precision.compute is not torch.float32

    def layout(self) -> Layout:
        """Return the vectors of host memory."""
        kinds = {"parameter": (torch.float32, self.size)}
        # the last of these two is followed by the frozen part
        source = "mirror" if self.narrow else "parameter"
        kinds[source] = self.precision.compute, self.whole
        kinds |= dict.fromkeys(KINDS, (self.precision.moments, self.size))
        return {f"{self.name}/{kind}": entry for kind, entry in kinds.items()}

    def map(self, memory: Mapping[str, Tensor]) -> None:
        """Take the unit's vectors."""
        mirror = ("mirror",) if self.narrow else ()
        for kind in ("parameter", *mirror, *KINDS):
            self.vectors[kind] = memory[f"{self.name}/{kind}"][: self.size]
        self.source = memory[f"{self.name}/{'mirror' if self.narrow else 'parameter'}"]
        self.vectors[FROZEN] = self.source[self.size :]

    def store(self) -> None:
        """Copy the parameters, the same on all ranks, to this rank's chunks of host memory."""
        for kind in ("parameter", FROZEN):
            vector = self.vectors[kind]
            whole = torch.zeros_like(vector)
            for name, view in named_parts(whole, self._shapes_in(kind)).items():
                view.copy_(self.parameters[name].data)
            shard = chunk_of(vector, self._rank, self._world_size)
            shard.copy_(chunk_of(whole, self._rank, self._world_size))

    def check(self) -> None:
        """Check that the trained parameters are still those of the beginning.

        Raises:
            UserError: `requires_grad` of one was changed.
        """
        for name, parameter in self.parameters.items():
            if parameter.requires_grad is not (name in self.shapes):
                raise UserError(
                    f"slide: requires_grad of {name} has been set to {parameter.requires_grad}: "
                    "set it back, or build a new engine from a model with this choice"
                )

    @torch.no_grad()
    def refresh(self) -> None:
        """Update the mirror of this rank's chunk after a write to the parameters."""
        if self.narrow:
            self.vectors["mirror"][self.shard].copy_(self.vectors["parameter"][self.shard])

    def bind(self, vector: Tensor) -> None:
        """Make the parameters views of a vector on the device, which is used again and again."""
        for parameter, view in zip(self.parameters.values(), self._views_of(vector), strict=True):
            parameter.data = view

    def unbind(self, device: torch.device) -> None:
        """Make the parameters NaN, without memory."""
        if not self._nan:
            one = torch.full((), torch.nan, dtype=self.precision.compute, device=device)
            self._nan = [one.expand(p.shape) for p in self.parameters.values()]
        for parameter, nan in zip(self.parameters.values(), self._nan, strict=True):
            parameter.data = nan

    def collect(self, vector: Tensor) -> None:
        """Move the gradients to a vector on the device; zeros where there are none."""
        for name, view in zip(self.shapes, self._views_of(vector), strict=True):
            parameter = self.parameters[name]
            if parameter.grad is None:
                view.zero_()
            else:
                view.copy_(parameter.grad)
                parameter.grad = None
        vector[self.count :].zero_()

    def named(self, kind: str) -> dict[str, Tensor]:
        """Return the parts of one of its vectors by parameter, if it has any of that kind."""
        shapes = self._shapes_in(kind)
        return named_parts(self.vectors[kind], shapes) if shapes else {}

    def _shapes_in(self, kind: str) -> dict[str, torch.Size]:
        return self.frozen_shapes if kind == FROZEN else self.shapes

    def _views_of(self, vector: Tensor) -> list[Tensor]:
        """Return cached views: the training thread would spend more on them than on the rest."""
        address = vector.data_ptr()  # of no other vector, as the views keep the memory
        if address not in self._views:
            parts = [named_parts(vector, self.shapes)]
            if vector.numel() > self.size:  # parameters; gradients have no frozen part
                parts.append(named_parts(vector[self.size :], self.frozen_shapes))
            self._views[address] = [view for part in parts for view in part.values()]
        return self._views[address]


def chunk_of(vector: Tensor, rank: int, world_size: int) -> Tensor:
    """Return one of W equal parts."""
    size = vector.numel() // world_size
    return vector[rank * size : (rank + 1) * size]


def _elements(shapes: Mapping[str, torch.Size]) -> int:
    return sum(shape.numel() for shape in shapes.values())
