"""Strategies that plans and probes compare: torch's own, and what changes training, the mildest
first."""

from collections.abc import Mapping
from typing import Any, NamedTuple

PLANNED_CODECS = ("int8", "int4")
SYNC_EVERY = (8, 32, 128)
"""steps from one synchronisation of parameters to the next"""


class NamedStrategy(NamedTuple):
    """A strategy to consider."""

    name: str
    document: Mapping[str, Any]
    """strategy, as in params.yaml"""
    lossy: bool = False
    """whether it changes training"""
    codec: str = ""
    """codec of the synchronisation, as it was named; empty: none"""


def candidates(nodes: int, per_node: int, feedback: bool = True) -> list[NamedStrategy]:
    """Return the strategies for so many nodes, what changes training least before what does more.

    Args:
        feedback: whether error feedback is possible; fp16 has none.
    """
    slide = NamedStrategy("slide", {"engine": "slide"})
    if per_node > 1:
        moved = {"param_transfer": "shard", "grad_sync": "gpu_reduce"}
        slide = slide._replace(document={**slide.document, **moved})
    if nodes * per_node == 1:
        return [NamedStrategy("plain", {"engine": "ddp"}), slide]
    offers = [NamedStrategy("ddp", {"engine": "ddp"}), NamedStrategy("fsdp2", {"engine": "fsdp2"})]
    islands = nodes > 1 and per_node > 1
    stock, *lossy = replica_candidates("int4", nodes if islands else 1, feedback)
    if islands:
        offers.append(stock)
    # to exchange in two levels sends less between nodes than to exchange among all
    for codec in PLANNED_CODECS:
        coded = {"between_nodes" if islands else "codec": codec}
        document = {"gradients": coded, "weights": {"codec": codec}}
        offers.append(NamedStrategy(f"fsdp2, {codec} both ways", document, lossy=True))
    return [*offers, slide, *lossy]


def replica_candidates(codec: str, nodes: int = 1, feedback: bool = True) -> list[NamedStrategy]:
    """Return the ways to synchronise replicas: every step, uncompressed, by int8 and by a stronger
    codec; and every so many steps.

    Args:
        codec: the strongest compression.
        nodes: replicas, each of which shards the model inside; 1: each rank is a replica.
        feedback: whether the strongest compression of every step has error feedback.
    """
    name = "ddp"
    base: dict[str, Any] = {"engine": "ddp"}
    mild, strong = {"codec": "int8"}, {"codec": codec, "error_feedback": feedback}
    if nodes > 1:
        name, base = "hsdp", {"sharding": "hybrid_shard", "replicas": nodes}
        mild, strong = {"between_nodes": "int8"}, {"between_nodes": codec}
    offers = [NamedStrategy(name, base)]
    for gradients, coded in {"int8": mild, codec: strong}.items():
        document = {**base, "gradients": coded}
        offers.append(NamedStrategy(f"{name}, {gradients}", document, True, gradients))
    for every in SYNC_EVERY:
        document = {**base, "sync": {"every": every, "codec": codec}}
        title = f"{name}, {codec} every {every} steps"
        offers.append(NamedStrategy(title, document, lossy=True, codec=codec))
    return offers
