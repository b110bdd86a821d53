"""Residuals of two levels for another number of ranks or of ranks in a node.

With L ranks in a node the applied mean is owed (`shardlab.comm.merge` has one level), per chunk
c = L * node + place of the W = L * N chunks of a vector:

    unit>place          (1/W) * sum over all ranks of row `node` of what they hold
    unit@nodes>node     (1/W) * sum over the N ranks of the same place
    unit@nodes<         as it is, on rank c
    unit<               row `node` of what the ranks of the same place hold, alike in every node

Each of the four is put together as chunks in rank order, cut into the chunks of the new ranks, and
scaled so that the same is owed.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shardlab.comm.hierarchy import ACROSS
from shardlab.comm.layout import Layout
from shardlab.comm.residuals import mean, store_like, widen


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
