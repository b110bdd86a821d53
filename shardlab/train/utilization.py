"""Use of the machine by a run: CPUs of its ranks, floating-point operations per token, memory."""

from dataclasses import asdict
from time import perf_counter

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from shardlab.comm.object_collectives import gather_values
from shardlab.core.host import machine_key, resident_memory
from shardlab.core.ranges import format_ranges
from shardlab.kernels.cpu_placement import RankLocation, place_here
from shardlab.models.blocks import attention_of
from shardlab.train.launch import launch
from shardlab.train.rank import gpu_node
from shardlab.train.settings import Train

_SIZES = {"cpu": 1024, "cuda": 8192}
_SECONDS = 0.1


def flops_per_token(model: PreTrainedModel, sequence_length: int) -> float:
    """Return the FLOPs of forward and backward: 6 N + 12 H Q T for each layer.

    N are the parameters without embeddings, which look up and multiply nothing; a weight counts as
    often as layers use it, and one that an embedding shares with the head once. A layer has H
    heads of Q elements, whose queries see T tokens: the sequence, their window, or none without
    attention. Causal attention counts in full, and recomputation does not count. Source: Chowdhery
    et al. 2022 (PaLM), appendix B.

    Args:
        model: before an engine wraps it, on any device.
    """
    multiplied = sum(
        parameter.numel()
        for part in (part for _, part in model.named_modules(remove_duplicate=False))
        if not isinstance(part, nn.Embedding)
        for parameter in part.parameters(recurse=False)
    )
    attention = sum(layer.products(sequence_length) for layer in attention_of(model))
    return float(6 * (multiplied + attention))


def product_flops_per_s(
    device: torch.device, dtype: torch.dtype, group: dist.ProcessGroup
) -> float:
    """Return the rate of this rank's fastest square matrix product while all ranks multiply."""
    n = _SIZES[device.type]
    # noise: with constant factors a GPU needs less power, and its clock is higher
    noise = torch.Generator(device).manual_seed(0)
    factor = torch.randn(n, n, dtype=dtype, device=device, generator=noise)
    product = factor @ factor
    dist.barrier(group)
    begin, best = perf_counter(), float("inf")
    while perf_counter() - begin < _SECONDS or best == float("inf"):
        start = perf_counter()
        torch.mm(factor, factor, out=product)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, perf_counter() - start)
    dist.barrier(group)  # a rank that continues would disturb those that are still timed
    return 2 * n**3 / best


def peak_memory(device: torch.device) -> int:
    """Return the most memory that this process has used of the device that computes, in bytes: its
    resident set on a CPU, tensors on a GPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resident_memory().highest


class MemoryMeter:
    """Meter of the memory that a run takes from its creation on, which is before there is a model.

    On a CPU the growth is that of the resident set without mapped files: the code of libraries is
    mapped when it is first used, and is no memory of the run. On a GPU it is that of tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = resident_memory()
        self._final: dict[str, int | None] | None = None
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._allocated = torch.cuda.memory_allocated(device)

    def used(self) -> dict[str, int | None]:
        """Return the fields `memory_` of a record, of what the run has taken so far."""
        return self._final or self._read()

    def stop(self) -> None:
        """Leave out of `used` what is taken from now on."""
        self._final = self.used()

    def _read(self) -> dict[str, int | None]:
        now, before, reserved = resident_memory(), self._before, None
        grown = max(0, now.highest - before.now - (now.of_files - before.of_files))
        if self._device.type == "cuda":
            grown = torch.cuda.max_memory_allocated(self._device) - self._allocated
            reserved = torch.cuda.max_memory_reserved(self._device)
        return {
            "memory_peak_bytes": peak_memory(self._device),
            "memory_growth_bytes": grown,
            "memory_reserved_bytes": reserved,
        }


def placements(group: dist.ProcessGroup) -> list[str]:
    """Return a line for each rank, in rank order; on every rank.

    An engine with threads uses some of the CPUs for control, and others for its workers.

    Args:
        group: all ranks of the run.
    """
    rank, machine = dist.get_rank(group), machine_key()
    everywhere = gather_values(asdict(RankLocation.here(gpu_node())), group)
    # not LOCAL_RANK: nodes of emulated links share a machine
    here = [other for other, key in enumerate(gather_values(machine, group)) if key == machine]
    local = [RankLocation(**everywhere[other]) for other in here]
    mine = place_here(local)[here.index(rank)]
    line = (
        f"CPUs {format_ranges(everywhere[rank]['cpus'])} (control {format_ranges(mine.control)}, "
        f"workers {format_ranges(mine.workers)})"
    )
    return gather_values(line, group)


def show_placements(train: Train) -> None:
    """Start the ranks as for a run, print a line for each, and end them.

    Raises:
        RunFailed, UserError: as `launch`.
    """

    def worker(group: dist.ProcessGroup) -> None:
        lines = placements(group)
        if dist.get_rank(group) == 0:
            print(*(f"rank {rank}: {line}" for rank, line in enumerate(lines)), sep="\n")

    launch(worker, train.world_size, train.threads, train.timeout_s, placement=train.placement)
