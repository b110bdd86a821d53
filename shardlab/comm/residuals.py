"""Residuals of error feedback: storage, layout in messages, and merging for other ranks.

Storage of a residual:

    fp32    4 bytes per element, exact
    bf16    2 bytes, rounded to nearest even
    int8    1 byte and 1/64 for the scales: `shardlab.kernels.integers` in groups of 128

Error feedback loses what this rounding drops, as in LoCo (Xie et al. 2024), which stores residuals
in eight bits. Magnitudes are clamped to 2**126, the largest that both narrow forms hold.

Merging: the applied mean of W ranks is (1/W) * sum over ranks r of D(C(g_r + e_r)), so the
residuals still owe (1/W) * sum of e_r to the parameters. On W' ranks the same is owed if

    (1/W') * sum over r' of e'_r' = (1/W) * sum over r of e_r,

which holds for e'_r' = (1/W) * sum over r of e_r on every new rank. The residual of an owner's mean
(part `unit<`) is owed as it is: shards are concatenated and cut for the new ranks.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from shardlab.codecs.unit import Block, Unit
from shardlab.core.errors import UserError
from shardlab.devices.registry import accelerator_of
from shardlab.kernels.integers import KERNELS

Residual = Literal["fp32", "bf16", "int8"]
State = dict[str, Tensor]

LAYOUT = "layout:"
"""prefix of layouts in the state of error feedback; parts begin with units, which have no colon"""
REPLICAS = "@replicas"
"""suffix of units that are summed over the replicas of a two-dimensional mesh"""
ACROSS = "@nodes"
"""suffix of units at the second level of `shardlab.comm.hierarchy`"""

_INT8 = KERNELS["int8"]
_GROUP = 128
_LARGEST = 2.0**126
_LARGEST_SCALE = torch.tensor(_LARGEST / 127, dtype=torch.bfloat16)
"""of a group that holds `_LARGEST`; larger elements have no smaller one"""
_DTYPES: dict[Residual, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "int8": torch.uint8,
}


def blank(kind: Residual, n: int, device: torch.device) -> Tensor:
    """Return n stored zeros."""
    size = _INT8.payload_bytes(n, _GROUP) if kind == "int8" else n
    return torch.zeros(size, dtype=_DTYPES[kind], device=device)


def elements(stored: Tensor) -> int:
    """Return the number of elements that `stored` holds."""
    if stored.dtype != torch.uint8:
        return stored.numel()
    groups = -(-stored.numel() // (_GROUP + 2))
    return stored.numel() - 2 * groups


def widen(stored: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the elements in float32: `stored` itself if that is its dtype.

    Args:
        out: float32 [elements], written otherwise; by default a new vector.
    """
    if stored.dtype == torch.float32:
        return stored
    if out is None:
        out = torch.empty(elements(stored), dtype=torch.float32, device=stored.device)
    if stored.dtype == torch.uint8:
        _INT8.decode_sum([stored], _GROUP, out)
    else:
        out.copy_(stored)
    return out


def narrow(vector: Tensor, stored: Tensor) -> None:
    """Write a finite float32 vector to `stored`; clamp in `vector` what its form cannot hold."""
    if stored.dtype == torch.float32:
        stored.copy_(vector)
    elif stored.dtype == torch.uint8:
        if on_device := accelerator_of(vector.device) is not None:
            vector.clamp_(-_LARGEST, _LARGEST)  # the host would wait for a look at the scales
        _INT8.encode(vector, _GROUP, payload=stored)
        if on_device:
            return
        # checking the scales is cheaper than a pass over all elements; NaN means too large
        scales = stored[: 2 * -(-vector.numel() // _GROUP)].view(torch.bfloat16)
        if scales.numel() and not scales.amax() < _LARGEST_SCALE:
            _INT8.encode(vector.clamp_(-_LARGEST, _LARGEST), _GROUP, payload=stored)
    else:
        stored.copy_(vector.clamp_(-_LARGEST, _LARGEST))


class Layout(NamedTuple):
    """Order of the elements of a unit in a message of a given world size.

    `scattered`: as `shardlab.codecs.unit.Unit` defines it, rows over the ranks, block by block;
    otherwise one vector that is padded at its end to a multiple of the world size.
    """

    world_size: int
    scattered: bool
    shapes: tuple[tuple[int, int], ...]
    """rows and columns of each block"""
    ranks_per_node: int = 0
    """of two levels, whose residuals lie in the order of `shardlab.comm.hierarchy`; 0 for one"""

    @classmethod
    def scattering(cls, unit: Unit, world_size: int, n: int) -> "Layout":
        """Return the layout of vector[world_size * n], scattered; without blocks one of n rows."""
        blocks = unit.blocks or (Block(unit.name, world_size * n, 1),)
        return cls(world_size, True, tuple((b.rows, b.columns) for b in blocks))

    @classmethod
    def whole(cls, world_size: int, n: int) -> "Layout":
        """Return the layout of vector[n] that is summed whole."""
        return cls(world_size, False, ((n, 1),))

    def tensor(self) -> Tensor:
        """Return int64 [3 + 2 * blocks], for a state."""
        numbers = [self.world_size, int(self.scattered), self.ranks_per_node]
        return torch.tensor([*numbers, *(x for shape in self.shapes for x in shape)])

    @classmethod
    def of(cls, tensor: Tensor) -> "Layout":
        """Return the layout from its `tensor()`."""
        world_size, scattered, ranks_per_node, *rest = tensor.tolist()
        shapes = tuple(zip(rest[::2], rest[1::2], strict=True))
        return cls(world_size, bool(scattered), shapes, ranks_per_node)

    def describe(self) -> str:
        """Return a phrase for messages."""
        elements = sum(rows * columns for rows, columns in self.shapes)
        nodes = f" in nodes of {self.ranks_per_node}" if self.ranks_per_node else ""
        return f"{elements} elements in {len(self.shapes)} blocks on {self.world_size} ranks{nodes}"

    def blocks_of(self, chunks: Sequence[Tensor]) -> list[Tensor]:
        """Return the blocks [rows, columns] without padding, from the chunks of all ranks."""
        widths = [-(-rows // self.world_size) * columns for rows, columns in self.shapes]
        pieces = torch.stack(list(chunks)).split(widths, 1)
        return [
            piece.reshape(-1, columns)[:rows]
            for piece, (rows, columns) in zip(pieces, self.shapes, strict=True)
        ]

    def chunks_of(self, blocks: Sequence[Tensor]) -> list[Tensor]:
        """Return the chunk of each rank, padded with zeros, from the blocks [rows, columns]."""
        size = self.world_size
        pieces = [
            torch.nn.functional.pad(block, (0, 0, 0, -len(block) % size)).reshape(size, -1)
            for block in blocks
        ]
        return list(torch.cat(pieces, 1))


def merge_residuals(
    states: Sequence[State], world_size: int, rank: int, ranks_per_node: int | None = None
) -> State:
    """Return the state of error feedback for `rank` of `world_size`, from those of all old ranks.

    Args:
        states: `ErrorFeedback.state_dict()` of every old rank, in their order.
        ranks_per_node: size of the new nodes, for residuals of two levels; by default as before.

    Raises:
        UserError: a state is missing, a residual has no layout, it is of a two-dimensional mesh, or
            the new ranks are not whole nodes.
    """
    layouts = {
        name.removeprefix(LAYOUT): Layout.of(tensor)
        for name, tensor in states[0].items()
        if name.startswith(LAYOUT)
    }
    if any(unit.endswith(REPLICAS) for unit in layouts):
        raise UserError(
            "merge_states: residuals of a two-dimensional mesh fit the same mesh alone: continue "
            "with it, or remove the keys with 'gradients.residual' from the states"
        )
    merged: State = {}
    for unit, layout in layouts.items():
        if layout.world_size != len(states):
            raise UserError(
                f"merge_states: {unit!r} was shared by {layout.world_size} ranks, but there are "
                f"{len(states)} states: give those of all ranks, in their order"
            )
        new = layout._replace(world_size=world_size)
        if layout.ranks_per_node:
            node = ranks_per_node or layout.ranks_per_node
            if world_size % node:
                raise UserError(
                    f"merge_states: {world_size} ranks are not whole nodes of {node}: "
                    "give ranks_per_node"
                )
            new = new._replace(ranks_per_node=node)
        merge = _merge_levels if layout.ranks_per_node else _merge_unit
        merged |= merge(states, unit, layout, new, rank)
        merged[LAYOUT + unit] = new.tensor()
    known = {part for unit, layout in layouts.items() for part in _parts(unit, layout)}
    lost = [name for name in states[0] if not name.startswith(LAYOUT) and name not in known]
    if lost:
        raise UserError(
            f"merge_states: the layout of the residual {lost[0]!r} is unknown: continue on the "
            "same number of ranks"
        )
    return merged


def _parts(unit: str, layout: Layout) -> list[str]:
    levels = (unit, unit + ACROSS) if layout.ranks_per_node else (unit,)
    to = range(layout.world_size)
    return [f"{unit}*", *(f"{u}<" for u in levels), *(f"{u}>{i}" for u in levels for i in to)]


def _merge_unit(states: Sequence[State], unit: str, old: Layout, new: Layout, rank: int) -> State:
    """Return the residuals of a unit of one level for `rank` of the new layout."""
    first, merged = states[0], _merge_owners(states, f"{unit}<", old, new, rank)
    if f"{unit}>0" in first:
        chunks = [_mean([state[f"{unit}>{to}"] for state in states]) for to in range(len(states))]
        for to, chunk in enumerate(_cut(chunks, old, new)):
            merged[f"{unit}>{to}"] = _store_like(first[f"{unit}>0"], chunk)
    if f"{unit}*" in first:
        vector = _mean([state[f"{unit}*"] for state in states])
        if old.scattered:
            vector = torch.cat(_cut(vector.chunk(old.world_size), old, new))
        merged[f"{unit}*"] = _store_like(first[f"{unit}*"], vector)
    return merged


def _merge_levels(states: Sequence[State], unit: str, old: Layout, new: Layout, rank: int) -> State:
    """Return the residuals of both levels of a unit for `rank` of the new layout."""
    places, nodes = old.ranks_per_node, old.world_size // old.ranks_per_node
    across = unit + ACROSS
    first, merged = states[0], _merge_owners(states, f"{across}<", old, new, rank)
    if f"{unit}>0" in first:
        sums = [_mean([state[f"{unit}>{place}"] for state in states]) for place in range(places)]
        for place, vector in enumerate(_by_place(_cut(_by_rank(sums, nodes), old, new), new)):
            merged[f"{unit}>{place}"] = _store_like(first[f"{unit}>0"], vector)
    if f"{across}>0" in first:
        # the mean over nodes of one place is L times what it owes, before and after
        chunks = [
            _mean([state[f"{across}>{node}"] for state in states[place::places]]) / places
            for node in range(nodes)
            for place in range(places)
        ]
        own = _cut(chunks, old, new)[rank % new.ranks_per_node :: new.ranks_per_node]
        for node, chunk in enumerate(own):
            merged[f"{across}>{node}"] = _store_like(
                first[f"{across}>0"], chunk * new.ranks_per_node
            )
    if f"{unit}<" in first:
        held = [widen(state[f"{unit}<"]) for state in states[:places]]
        vectors = _by_place(_cut(_by_rank(held, nodes), old, new), new)
        merged[f"{unit}<"] = _store_like(first[f"{unit}<"], vectors[rank % new.ranks_per_node])
    return merged


def _merge_owners(states: Sequence[State], part: str, old: Layout, new: Layout, rank: int) -> State:
    """Return this rank's part of the residuals that owners of shards hold, if there are any."""
    if part not in states[0]:
        return {}
    shards = _cut([widen(state[part]) for state in states], old, new)
    return {part: _store_like(states[0][part], shards[rank])}


def _cut(chunks: Sequence[Tensor], old: Layout, new: Layout) -> list[Tensor]:
    return new.chunks_of(old.blocks_of(chunks))


def _by_rank(vectors: Sequence[Tensor], nodes: int) -> list[Tensor]:
    """Return chunks in the order of ranks, from one vector [nodes * n] per rank of a node."""
    rows = [vector.chunk(nodes) for vector in vectors]
    return [row[node] for node in range(nodes) for row in rows]


def _by_place(chunks: Sequence[Tensor], layout: Layout) -> list[Tensor]:
    """Return one vector [nodes * n] per rank of a node, from chunks in the order of ranks."""
    size = layout.ranks_per_node
    return [torch.cat(list(chunks[place::size])) for place in range(size)]


def _store_like(stored: Tensor, vector: Tensor) -> Tensor:
    """Return a float32 vector in the form of `stored`."""
    kind = next(kind for kind, dtype in _DTYPES.items() if dtype == stored.dtype)
    result = blank(kind, vector.numel(), vector.device)
    narrow(vector.clone(), result)
    return result


def _mean(stored: Sequence[Tensor]) -> Tensor:
    """Return the mean of residuals in float32, summed in float64."""
    total = torch.zeros(elements(stored[0]), dtype=torch.float64, device=stored[0].device)
    for each in stored:
        total += widen(each)
    return (total / len(stored)).float()
