"""Merging of the residuals of error feedback for another number of ranks.

The applied mean of W ranks is (1/W) * sum over ranks r of D(C(g_r + e_r)), so the residuals still
owe (1/W) * sum of e_r to the parameters. On W' ranks the same is owed if

    (1/W') * sum over r' of e'_r' = (1/W) * sum over r of e_r,

which holds for e'_r' = (1/W) * sum over r of e_r on every new rank. The residual of an owner's mean
(part `unit<`) is owed as it is: shards are concatenated and cut for the new ranks.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shardlab.comm.layout import ACROSS, LAYOUT, REPLICAS, Layout
from shardlab.comm.residuals import mean, store_like, widen
from shardlab.core.errors import UserError

State = dict[str, Tensor]


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
        chunks = [mean([state[f"{unit}>{to}"] for state in states]) for to in range(len(states))]
        for to, chunk in enumerate(_cut(chunks, old, new)):
            merged[f"{unit}>{to}"] = store_like(first[f"{unit}>0"], chunk)
    if f"{unit}*" in first:
        vector = mean([state[f"{unit}*"] for state in states])
        if old.scattered:
            vector = torch.cat(_cut(vector.chunk(old.world_size), old, new))
        merged[f"{unit}*"] = store_like(first[f"{unit}*"], vector)
    return merged


def _merge_levels(states: Sequence[State], unit: str, old: Layout, new: Layout, rank: int) -> State:
    """Return the residuals of both levels of a unit for `rank` of the new layout."""
    places, nodes = old.ranks_per_node, old.world_size // old.ranks_per_node
    across = unit + ACROSS
    first, merged = states[0], _merge_owners(states, f"{across}<", old, new, rank)
    if f"{unit}>0" in first:
        sums = [mean([state[f"{unit}>{place}"] for state in states]) for place in range(places)]
        for place, vector in enumerate(_by_place(_cut(_by_rank(sums, nodes), old, new), new)):
            merged[f"{unit}>{place}"] = store_like(first[f"{unit}>0"], vector)
    if f"{across}>0" in first:
        # the mean over nodes of one place is L times what it owes, before and after
        chunks = [
            mean([state[f"{across}>{node}"] for state in states[place::places]]) / places
            for node in range(nodes)
            for place in range(places)
        ]
        own = _cut(chunks, old, new)[rank % new.ranks_per_node :: new.ranks_per_node]
        for node, chunk in enumerate(own):
            merged[f"{across}>{node}"] = store_like(
                first[f"{across}>0"], chunk * new.ranks_per_node
            )
    if f"{unit}<" in first:
        held = [widen(state[f"{unit}<"]) for state in states[:places]]
        vectors = _by_place(_cut(_by_rank(held, nodes), old, new), new)
        merged[f"{unit}<"] = store_like(first[f"{unit}<"], vectors[rank % new.ranks_per_node])
    return merged


def _merge_owners(states: Sequence[State], part: str, old: Layout, new: Layout, rank: int) -> State:
    """Return this rank's part of the residuals that owners of shards hold, if there are any."""
    if part not in states[0]:
        return {}
    shards = _cut([widen(state[part]) for state in states], old, new)
    return {part: store_like(states[0][part], shards[rank])}


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
