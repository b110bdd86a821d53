"""States of one number of ranks for another: what error feedback holds back is never dropped.

The applied mean of W ranks is (1/W) * sum over ranks r of D(C(g_r + e_r)), so the residuals still
owe (1/W) * sum of e_r to the parameters. On W' ranks the same is owed if

    (1/W') * sum over r' of e'_r' = (1/W) * sum over r of e_r,

which holds for e'_r' = (1/W) * sum over r of e_r on every new rank: old residuals are summed, and
the sum is shared by the new ranks. What the owner of a shard holds back of a mean (part `unit<`) is
owed as it is: the shards are put together and cut anew.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shardlab.comm.hierarchy import ACROSS
from shardlab.comm.layout import PREFIX, REPLICAS, Layout
from shardlab.comm.residuals import mean, store_like, widen
from shardlab.core.errors import UserError

State = dict[str, Tensor]


def merge_residuals(
    states: Sequence[State], world_size: int, rank: int, ranks_per_node: int | None = None
) -> State:
    """The state of error feedback for `rank` of `world_size`, from those of all old ranks.

    Args:
        states: `ErrorFeedback.state_dict()` of every old rank, in their order.
        ranks_per_node: size of the new nodes, for residuals of two levels; by default as before.

    Raises:
        UserError: a state is missing, a residual has no layout, it is of a two-dimensional mesh, or
            the new ranks do not make up whole nodes.
    """
    layouts = {
        name.removeprefix(PREFIX): Layout.of(tensor)
        for name, tensor in states[0].items()
        if name.startswith(PREFIX)
    }
    if any(unit.endswith(REPLICAS) for unit in layouts):
        raise UserError(
            "merge_states: residuals of a two-dimensional mesh serve the same mesh alone: go on "
            "with it, or remove the keys that begin with 'gradients.residual.' from the states"
        )
    merged: State = {}
    for unit, layout in layouts.items():
        if layout.world_size != len(states):
            raise UserError(
                f"merge_states: {unit!r} was shared by {layout.world_size} ranks, but there are "
                f"{len(states)} states: give those of all ranks, in their order"
            )
        new = layout.for_ranks(world_size)
        if layout.ranks_per_node:
            new = new.in_nodes(ranks_per_node or layout.ranks_per_node)
            merged |= merge_levels(states, unit, layout, new, rank)
        else:
            merged |= _merge_unit(states, unit, layout, new, rank)
        merged[PREFIX + unit] = new.tensor()
    done = {part for unit, layout in layouts.items() for part in _parts(unit, layout)}
    lost = [name for name in states[0] if not name.startswith(PREFIX) and name not in done]
    if lost:
        raise UserError(
            f"merge_states: nobody knows the layout of the residual {lost[0]!r}: such residuals "
            "serve the same number of ranks alone"
        )
    return merged


def _parts(unit: str, layout: Layout) -> list[str]:
    levels = (unit, unit + ACROSS) if layout.ranks_per_node else (unit,)
    to = range(layout.world_size)
    return [f"{unit}*", *(f"{u}<" for u in levels), *(f"{u}>{i}" for u in levels for i in to)]


def _merge_unit(
    states: Sequence[State], unit: str, layout: Layout, new: Layout, rank: int
) -> State:
    first = states[0]
    merged: State = {}
    if f"{unit}>0" in first:
        old = range(layout.world_size)
        chunks = [mean([state[f"{unit}>{to}"] for state in states]) for to in old]
        anew = new.chunks_of(layout.blocks_of(chunks))
        merged |= {f"{unit}>{to}": store_like(first[f"{unit}>0"], c) for to, c in enumerate(anew)}
    if f"{unit}<" in first:
        shards = [widen(state[f"{unit}<"]) for state in states]
        anew = new.chunks_of(layout.blocks_of(shards))
        merged[f"{unit}<"] = store_like(first[f"{unit}<"], anew[rank])
    if f"{unit}*" in first:
        vector = mean([state[f"{unit}*"] for state in states])
        if layout.scattered:
            blocks = layout.blocks_of(vector.chunk(layout.world_size))
            vector = torch.cat(new.chunks_of(blocks))
        merged[f"{unit}*"] = store_like(first[f"{unit}*"], vector)
    return merged


def merge_levels(
    states: Sequence[dict[str, Tensor]], unit: str, old: Layout, new: Layout, rank: int
) -> dict[str, Tensor]:
    """The residuals of both levels of `unit` for `rank` of the new layout."""
    places, nodes = old.ranks_per_node, old.world_size // old.ranks_per_node
    first, merged = states[0], {}
    across = unit + ACROSS

    def cut(chunks: Sequence[Tensor]) -> list[Tensor]:
        return new.chunks_of(old.blocks_of(chunks))

    if f"{unit}>0" in first:
        sums = [mean([state[f"{unit}>{place}"] for state in states]) for place in range(places)]
        for place, vector in enumerate(_by_place(cut(_by_rank(sums, nodes)), new)):
            merged[f"{unit}>{place}"] = store_like(first[f"{unit}>0"], vector)
    if f"{across}>0" in first:
        # the mean over nodes of one place is L times what it owes, before and after
        chunks = [
            mean([state[f"{across}>{node}"] for state in states[place::places]]) / places
            for node in range(nodes)
            for place in range(places)
        ]
        own = cut(chunks)[rank % new.ranks_per_node :: new.ranks_per_node]
        for node, chunk in enumerate(own):
            merged[f"{across}>{node}"] = store_like(
                first[f"{across}>0"], chunk * new.ranks_per_node
            )
    if f"{across}<" in first:
        chunk = cut([widen(state[f"{across}<"]) for state in states])[rank]
        merged[f"{across}<"] = store_like(first[f"{across}<"], chunk)
    if f"{unit}<" in first:
        held = [widen(state[f"{unit}<"]) for state in states[:places]]
        vector = _by_place(cut(_by_rank(held, nodes)), new)[rank % new.ranks_per_node]
        merged[f"{unit}<"] = store_like(first[f"{unit}<"], vector)
    return merged


def _by_rank(vectors: Sequence[Tensor], nodes: int) -> list[Tensor]:
    """Chunks in the order of ranks, from one vector [nodes * n] per place."""
    rows = [vector.chunk(nodes) for vector in vectors]
    return [row[node] for node in range(nodes) for row in rows]


def _by_place(chunks: Sequence[Tensor], layout: Layout) -> list[Tensor]:
    """One vector [nodes * n] per place, from chunks in the order of ranks."""
    size = layout.ranks_per_node
    return [torch.cat(list(chunks[place::size])) for place in range(size)]
