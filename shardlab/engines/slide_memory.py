"""Host memory of the `slide` engine: what ranks of a node share, units and gradients in it."""

import mmap
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardlab.codecs.base import Block, Unit
from shardlab.comm.background import Running
from shardlab.comm.collective import REPLICAS
from shardlab.comm.object_collectives import gather_values, run_or_fail_together
from shardlab.core.errors import UserError
from shardlab.core.host import free_memory_bytes
from shardlab.engines.flat import named_parts
from shardlab.engines.slide_groups import RankGroups
from shardlab.models.streamed_layout import KeptGradients, slot_sizes

VectorLayout = dict[str, tuple[torch.dtype, int]]
"""type and number of elements of vectors, by name"""
KINDS = ("exp_avg", "exp_avg_sq")
"""the moments of AdamW"""
FROZEN = "frozen"
"""the vector of parameters that are not trained"""

MOMENTS_VARIABLE = "SHARDLAB_MOMENTS"
"""of the environment: the folder of `moments: disk`"""
_SHARED = Path("/dev/shm")
_GIB = 1 << 30


def shared_vectors(
    layout: VectorLayout, group: dist.ProcessGroup, folder: Path = _SHARED
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return zeroed vectors that all ranks of a node map; all call together, with equal arguments.

    They lie in a file, which is unlinked when all ranks have mapped it, so that its memory is gone
    with the last process, however that ends. Each rank allocates one of W equal parts of each
    vector: a page lies on the NUMA node of the CPU that allocates it.

    Args:
        folder: of the file: by default /dev/shm, which is memory; on a disk the kernel keeps as
            much of the file in memory as nobody else needs.

    Returns:
        the whole memory, uint8, and the vectors by name, each of which begins a page.

    Raises:
        UserError: (on all ranks) there is too little memory or disk, or the ranks cannot share it.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    places, total = _places(layout)
    on_disk = folder != _SHARED

    def create() -> str | None:
        if rank > 0:
            return None
        if not on_disk:
            _check_free(total)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(prefix=f"shardlab-{os.getpid()}-", dir=folder)
        except OSError as error:
            raise _no_room(folder, total, error) if on_disk else error from error
        os.ftruncate(descriptor, total)
        os.close(descriptor)
        return name

    def map_file() -> Tensor:
        try:
            with path.open("r+b") as file:
                for place in places.values():
                    size = place.stop - place.start
                    first, last = (place.start + size * r // world_size for r in (rank, rank + 1))
                    if first < last:  # a page that is missing at its use would end the process
                        os.posix_fallocate(file.fileno(), first, last - first)
        except OSError as error:
            if on_disk:
                raise _no_room(folder, total, error) from error
            raise _too_little(total, f"{_SHARED}: {(error.strerror or '').lower()}") from error
        # unlike those of torch.from_file, no bytes that profilers count as allocated by torch
        return torch.from_numpy(np.memmap(path, np.uint8, "r+", shape=(total,)))

    if world_size == 1 and not on_disk:
        _check_free(total)
        return own_vectors(layout)
    failed = "slide: the ranks of a node cannot share host memory"
    path = Path(gather_values(run_or_fail_together(group, failed, create), group)[0])
    try:
        memory = run_or_fail_together(group, failed, map_file)
    finally:
        if rank == 0:
            path.unlink()
    return memory, {name: memory[at].view(layout[name][0]) for name, at in places.items()}


def own_vectors(layout: VectorLayout) -> tuple[Tensor, dict[str, Tensor]]:
    """Return zeroed vectors of this rank alone, as `shared_vectors` does."""
    places, total = _places(layout)
    # named, as programs set another default device
    memory = torch.zeros(total + mmap.PAGESIZE, dtype=torch.uint8, device="cpu")
    # whole pages, since one page cannot be locked in parts
    start = -memory.data_ptr() % mmap.PAGESIZE
    memory = memory[start : start + total]
    return memory, {name: memory[at].view(layout[name][0]) for name, at in places.items()}


def _places(layout: VectorLayout) -> tuple[dict[str, slice], int]:
    """Return in bytes where vectors lie, each of which begins a page, and the size of all pages."""
    places: dict[str, slice] = {}
    total = 0
    for name, (dtype, elements) in layout.items():
        size = elements * dtype.itemsize
        places[name] = slice(total, total + size)
        total += -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    return places, total


def _check_free(total: int) -> None:
    if (free := free_memory_bytes()) < total:
        raise _too_little(total, f"only {free / _GIB:.2f} GiB are free")


def _too_little(total: int, why: str) -> UserError:
    return UserError(
        f"slide: the ranks of a node share {total / _GIB:.2f} GiB of host memory, and {why}: take "
        "a smaller model, states of fewer bits or more nodes, or enlarge /dev/shm (docker run "
        "--shm-size)"
    )


def _no_room(folder: Path, total: int, error: OSError) -> UserError:
    return UserError(
        f"slide: {total / _GIB:.2f} GiB of moments do not fit into {folder} ({error.strerror}): "
        f"make room, name another folder in {MOMENTS_VARIABLE}, or remove moments: disk"
    )


class SlideUnit:
    """Some parameters as one vector: the trained ones, 1/W by each rank of a node, then the frozen.

    In each part the parameters lie one after another, then zeros up to W equal chunks. Host memory,
    which the ranks share, holds the trained part in float32, its moments, and a mirror of it in the
    compute type where that is narrower. It holds the frozen part once, in the compute type, right
    behind that version of the trained part which goes to the device: one copy takes both.

    On the device it has one vector, whose memory comes and goes by `allocate` and `free`, so that
    what autograd saves of a parameter in forward is there again in backward. Outside of its use a
    parameter has no memory: every element of it is NaN, so that a use at the wrong time shows.

    Args:
        index: in the order of use; the root comes first.
        parameters: by name; with their shapes, but not yet their values. Those whose
            `requires_grad` is False stay frozen.
        rank, world_size: among the ranks of the node.
        compute: type of the parameters on the device.
        moments: type of the moments.
    """

    def __init__(
        self,
        index: int,
        name: str,
        parameters: Mapping[str, nn.Parameter],
        rank: int,
        world_size: int,
        compute: torch.dtype,
        moments: torch.dtype,
    ) -> None:
        self.index, self.name = index, name
        self.shapes = {n: p.shape for n, p in parameters.items() if p.requires_grad}
        """of trained parameters"""
        self.frozen_shapes = {n: p.shape for n, p in parameters.items() if not p.requires_grad}
        names = (*self.shapes, *self.frozen_shapes)
        self.parameters = {n: parameters[n] for n in names}
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
        self.dtype, self._moments = compute, moments
        self.message = Unit(name, (Block(name, self.count, 1),))
        """the trained part"""
        self.message_of_both = Unit(name, (Block(name, self.whole, 1),))
        self.between_nodes = Unit(name + REPLICAS, (Block(name, self.chunk, 1),))
        self.step = torch.zeros((), dtype=torch.float32, device="cpu")
        """updates so far, continued from a checkpoint"""
        self._rank, self._world_size = rank, world_size
        self.vectors: dict[str, Tensor] = {}
        """whole: `parameter`, `exp_avg`, `exp_avg_sq`, `frozen`, perhaps `mirror`"""
        self.source = torch.empty(0, dtype=torch.float32)
        """both parts of what goes to the device"""

    @property
    def narrow(self) -> bool:
        """Return whether the device computes with a mirror."""
        return self.dtype is not torch.float32

    def layout(self) -> VectorLayout:
        """Return the vectors of host memory, without the moments."""
        kinds = {"parameter": (torch.float32, self.size)}
        # the last of these two is followed by the frozen part
        source = "mirror" if self.narrow else "parameter"
        kinds[source] = self.dtype, self.whole
        return {f"{self.name}/{kind}": entry for kind, entry in kinds.items()}

    def moment_layout(self) -> VectorLayout:
        """Return the vectors of the moments."""
        return {f"{self.name}/{kind}": (self._moments, self.size) for kind in KINDS}

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

    def place(self, device: torch.device) -> None:
        """Take the parameters' memory, and prepare the vector on the device, without memory."""
        one = torch.full((), torch.nan, dtype=self.dtype, device=device)
        self._nan = [one.expand(p.shape) for p in self.parameters.values()]
        self.on_device = torch.empty(self.whole, dtype=self.dtype, device=device)
        trained, frozen = self.on_device[: self.size], self.on_device[self.size :]
        parts = named_parts(trained, self.shapes), named_parts(frozen, self.frozen_shapes)
        # made once: the training thread would spend more on them than on the rest
        self._views = [view for part in parts for view in part.values()]
        self.allocated = True
        self.free()

    def allocate(self) -> None:
        """Allocate the vector on the device, uninitialised; the parameters are views of it."""
        self.on_device.untyped_storage().resize_(self.on_device.nbytes)
        self.allocated = True
        self._bind(self._views)

    def free(self) -> None:
        """Free the memory of the vector on the device."""
        self.on_device.untyped_storage().resize_(0)
        self.allocated = False
        self._bind(self._nan)

    def _bind(self, tensors: Sequence[Tensor]) -> None:
        for parameter, tensor in zip(self.parameters.values(), tensors, strict=True):
            parameter.data = tensor

    def collect(self, vector: Tensor) -> None:
        """Move the gradients to a vector on the device; zeros where there are none."""
        for name, view in named_parts(vector, self.shapes).items():
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


@dataclass(eq=False)
class GradSlot:
    """Host memory for the gradients of one unit at a time."""

    vectors: list[Tensor]
    """of all ranks where they add them up in shared memory, else of this rank alone"""
    local: Tensor
    """this rank's: whole, or its chunk where ranks reduce on the device"""
    busy: Running | None = None
    """after which it may be written to again, on all ranks"""

    def of(self, size: int) -> "GradSlot":
        """Return the beginnings of the vectors."""
        return GradSlot([vector[:size] for vector in self.vectors], self.local[:size], self.busy)


class GradBuffers:
    """Host memory for gradients: slots in which they arrive, and vectors that stay for a step.

    Where gradients stay as they arrive, each unit has a slot. Else units share a few, in turn, and
    the root has one more. Units are off-loaded in one order on all ranks (`SlideSchedule` sees to
    it), added up and applied in that order, so that what a slot waits for never waits for the slot.

    Args:
        units: those with a trained part, and the root first.
        chunks: ranks reduce on the device, and each keeps its chunk.
        dtype: of gradients as they arrive.
        pin: page-locks memory for the device that gradients come from.

    Raises:
        UserError: (on all ranks) there is too little memory.
    """

    def __init__(
        self,
        units: Sequence[SlideUnit],
        groups: RankGroups,
        keeping: KeptGradients,
        chunks: bool,
        dtype: torch.dtype,
        pin: Callable[[Tensor], None],
    ) -> None:
        self.keeping, self._groups, self._pin = keeping, groups, pin
        self._sizes = {unit.index: unit.chunk if chunks else unit.size for unit in units}
        self._order = {unit.index: number for number, unit in enumerate(units)}
        root, *others = self._sizes.values()
        self._alone = keeping == "arrived"
        sizes = [root, *others] if self._alone else slot_sizes(root, others)
        # where sums are kept other ranks read those, not what has arrived
        self._slots = self._allocate(sizes, dtype, groups.sums and keeping != "sums")
        summed = [root, *others] if keeping == "sums" else []
        self._totals = self._allocate(summed, torch.float32, groups.sums and keeping == "sums")

    def _allocate(self, sizes: Sequence[int], dtype: torch.dtype, shared: bool) -> list[GradSlot]:
        """Return slots of these sizes, in shared memory where several ranks read them."""
        rank = self._groups.rank
        ranks = range(self._groups.world_size) if shared else [rank]
        layout = {f"{n}.{r}": (dtype, size) for n, size in enumerate(sizes) for r in ranks}
        # page-locked in place: torch.zeros(pin_memory=True) takes up to twice as much
        memory, named = shared_vectors(layout, self._groups.here) if shared else own_vectors(layout)
        self._pin(memory)
        slots = [[named[f"{number}.{r}"] for r in ranks] for number in range(len(sizes))]
        return [GradSlot(slot, named[f"{number}.{rank}"]) for number, slot in enumerate(slots)]

    def slot(self, unit: SlideUnit) -> GradSlot:
        """Return the next slot of a unit, another one than its neighbours have."""
        number = self._order[unit.index]
        if not self._alone and number:
            number = 1 + number % (len(self._slots) - 1)
        return self._slots[number]

    def size(self, unit: SlideUnit) -> int:
        """Return the elements of a unit that this rank copies."""
        return self._sizes[unit.index]

    def total(self, unit: SlideUnit) -> GradSlot:
        """Return what keeps the sum of a unit's gradients over micro-batches."""
        return self._totals[self._order[unit.index]]


def chunk_of(vector: Tensor, rank: int, world_size: int) -> Tensor:
    """Return one of W equal parts."""
    size = vector.numel() // world_size
    return vector[rank * size : (rank + 1) * size]


def _elements(shapes: Mapping[str, torch.Size]) -> int:
    return sum(shape.numel() for shape in shapes.values())
