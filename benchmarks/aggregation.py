"""Errors of the mean gradient when it is reduced and scattered through a method.

Every rank cuts its vector into one chunk for each owner, encodes chunk by chunk, and the owner sums
what it decodes, as in `AllToAllCollective`. Codecs run in one process, multi-phase methods on real
ranks, whose messages are counted.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gradients import Gradients
from shardlab.codecs.base import Codec, MessageKey, Unit
from shardlab.codecs.multi_phase import MultiPhaseMethod
from shardlab.comm.ledger import Ledger
from shardlab.comm.multi_phase import GroupCommunicator

WORLD_SIZES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Errors:
    """Errors and traffic of one method, for the mean of the ranks' vectors."""

    bits: float
    """bytes that a rank sends to others x 8 / elements that it sends them"""
    one_shot: list[float]
    """|mean received - exact mean| / |exact mean| at each of `WORLD_SIZES`"""
    cumulative: float
    """the same of the sum over the steps"""
    cumulative_feedback: float | None
    extra_collectives: float
    """per reduction"""


def scattered(vector: Tensor, unit: Unit, world_size: int) -> Tensor:
    """Lay out a vector of whole blocks as `fully_shard` does: chunk after chunk, rows of each
    block.

    Raises:
        ValueError: the rows of a block cannot be shared out evenly.
    """
    if any(block.rows % world_size for block in unit.blocks):
        raise ValueError(f"{unit.name}: its rows do not fit {world_size} ranks")
    sizes = [block.rows * block.columns for block in unit.blocks]
    parts = [part.view(world_size, -1) for part in vector.split(sizes)]
    return torch.cat(parts, 1).flatten()


def relative(received: Tensor, exact: Tensor, magnitude: bool = True) -> float:
    """Return |received - exact| / |exact|; without magnitude, of the received vector scaled to
    |exact|."""
    received, exact = received.double(), exact.double()
    if not magnitude:
        received = received * (exact.abs().mean() / received.abs().mean())
    return float((received - exact).norm() / exact.norm())


def codec_errors(codec: Codec, gradients: Gradients, magnitude: bool) -> Errors:
    """Measure a codec; one without magnitude gets no error feedback, which needs it."""
    one_shot, sent = [], 0
    for world_size in WORLD_SIZES:
        vectors = gradients.ranks[:world_size]
        mean, sent = reduced(codec, [scattered(v, gradients.unit, world_size) for v in vectors], 0)
        exact = scattered(vectors.double().mean(0), gradients.unit, world_size)
        one_shot.append(relative(mean, exact, magnitude))
    plain = _cumulative(codec, gradients, feedback=False, magnitude=magnitude)
    return Errors(
        bits=8 * sent / gradients.ranks.numel(),
        one_shot=one_shot,
        cumulative=plain,
        cumulative_feedback=_cumulative(codec, gradients, feedback=True, magnitude=True)
        if magnitude
        else None,
        extra_collectives=1.0 if codec.variable else 0.0,
    )


def reduced(
    codec: Codec, vectors: list[Tensor], step: int, residuals: list[Tensor] | None = None
) -> tuple[Tensor, int]:
    """Return the mean of vectors [n] as their chunks' owners compute it, and all bytes encoded."""
    world_size, sent = len(vectors), 0
    mean = torch.empty_like(vectors[0])
    chunks = [vector.chunk(world_size) for vector in vectors]
    rests = None if residuals is None else [residual.chunk(world_size) for residual in residuals]
    for owner, out in enumerate(mean.chunk(world_size)):
        keys = [MessageKey(0, step, f"gradient>{owner}", rank) for rank in range(world_size)]
        payloads = []
        for rank, key in enumerate(keys):
            chunk = chunks[rank][owner]
            if rests is None:
                payloads.append(codec.encode(chunk, key))
            else:
                rest = rests[rank][owner]
                payloads.append(codec.encode_residual(chunk, rest, rest, key))
        codec.decode_sum(payloads, out, 1 / world_size, keys)
        sent += sum(payload.numel() for payload in payloads)
    return mean, sent


def _cumulative(codec: Codec, gradients: Gradients, feedback: bool, magnitude: bool) -> float:
    world_size = gradients.steps.shape[1]
    residuals = [torch.zeros_like(v) for v in gradients.steps[0]] if feedback else None
    applied, exact = (torch.zeros(gradients.steps.shape[2]).double() for _ in range(2))
    for step, ranks in enumerate(gradients.steps):
        vectors = [scattered(v, gradients.small_unit, world_size) for v in ranks]
        mean, _ = reduced(codec, vectors, step, residuals)
        applied, exact = applied + mean.double(), exact + torch.stack(vectors).double().mean(0)
    return relative(applied, exact, magnitude)


def phase_one_shot(
    method: MultiPhaseMethod, gradients: Gradients, group: dist.ProcessGroup
) -> float:
    """Return the error on every rank, after one sum of other batches at the same weights."""
    wire = GroupCommunicator(group, Ledger(), "gradients")
    unit, size = gradients.unit, wire.world_size
    for step, source in enumerate((gradients.before, gradients.ranks)):
        given = scattered(source[wire.rank], unit, size)
        shard = method.sum_scatter(given, unit, wire, MessageKey(0, step, unit.name, wire.rank))
    exact = scattered(gradients.ranks[:size].double().mean(0), unit, size)
    return relative(wire.gather(shard / size), exact)


def phase_cumulative(
    method: MultiPhaseMethod, gradients: Gradients, feedback: bool, group: dist.ProcessGroup
) -> tuple[float, float, float]:
    """Return cumulative error, bits per element, extra collectives per reduction, on every rank."""
    ledger = Ledger()
    wire = GroupCommunicator(group, ledger, "gradients")
    unit, size, n = gradients.small_unit, wire.world_size, gradients.steps.shape[2]
    residual = torch.zeros(n)
    applied, exact = torch.zeros(n // size).double(), torch.zeros(n // size).double()
    for step, ranks in enumerate(gradients.steps):
        given = scattered(ranks[wire.rank], unit, size) + residual
        key = MessageKey(0, step, unit.name, wire.rank)
        applied += method.sum_scatter(given, unit, wire, key) / size
        exact += scattered(ranks.double().mean(0), unit, size).chunk(size)[wire.rank]
        residual = given if feedback else residual
    steps, account = len(gradients.steps), ledger.accounts["gradients"]
    bits = 8 * account.bytes_wire / steps / (n * (size - 1) / size)
    extra = account.collectives / steps - 1
    error = relative(wire.gather(applied), wire.gather(exact))
    return error, bits, extra


def phase_errors(
    one_shot: list[float],
    plain: tuple[float, float, float],
    feedback: tuple[float, float, float],
) -> Errors:
    """Return the errors from the results of the ranks."""
    return Errors(plain[1], one_shot, plain[0], feedback[0], plain[2])
