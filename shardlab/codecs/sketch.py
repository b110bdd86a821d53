"""Largest elements of the sum, found by a count sketch: `sketch`.

A count sketch (Charikar, Chen and Farach-Colton 2002) is a table of `rows` rows of `buckets`
float32 numbers, a linear summary of a vector. With b = the 32 random bits of element i under the
two key words of a row (`shardlab.kernels.random`):

* bucket(i) = floor((b >> 1) * buckets / 2**31); sign(i) = -1 if b is odd, else 1;
* add: table[row][bucket(i)] += sign(i) * x_i, in float32, in the order of i;
* estimate of x_i: the median over rows of sign(i) * table[row][bucket(i)]; of an even number of
  rows the mean of the two in the middle (0.5 * lower + 0.5 * upper).

Tables of the same keys can be added. A NaN or an infinity makes its buckets NaN or infinite.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shardlab.codecs.base import MessageKey, Unit
from shardlab.codecs.multi_phase import Communicator, MultiPhaseMethod, alarm
from shardlab.codecs.selection import largest
from shardlab.kernels.compiled import compiled_on_gpus
from shardlab.kernels.random import random_bits

_STRETCH = 1 << 16
"""Elements of a stretch, within which 16 bits encode a position."""
Keys = Sequence[tuple[int, int]]
"""Two key words for each row of a table."""


class Sketch(MultiPhaseMethod):
    """Selection of the k elements of largest magnitude in the *sum*, found by a count sketch.

    Ivkin et al. 2019 (Sketched-SGD with HeavyMix). Phase 1 sums the sketches S(x_r), each a table
    of `rows` x max(1, round(width * n)) buckets (see the module). Sketches are linear, so their sum
    is the sketch of the sum. The k = max(1, round(density * n)) largest estimates are selected,
    ties to the lower index. Phase 2 sums the exact values of the selected elements: sent_r is x_r
    at these positions and 0 elsewhere. Each step draws new hashes.

    Biased. With a sketch wide enough to find the largest elements it is a contraction with
    delta >= k / n, so it needs error feedback. For some constant c, an element whose square is at
    least c / buckets of |sum x_r|^2 is found with probability 1 - exp(-Omega(rows)) (Charikar et
    al. 2002).

    Bits per element of a reduce-scatter: 32 * rows * width + 32 * density, and 16 * density +
    2**-11 for the positions, which the owners gather. An all-reduce needs no positions.

    Args:
        rows: Independent hash functions; the estimate is the median of their estimates.
        width: Buckets of a row, as a fraction of the elements.
        density: Fraction of the elements that is sent exactly.
    """

    name = "sketch"

    def __init__(self, rows: int = 5, width: float = 0.02, density: float = 0.01) -> None:
        super().__init__()
        self.rows = rows
        self.width = width
        self.density = density

    def elements_sent(self, n: int) -> int:  # noqa: D102
        return min(n, max(1, round(self.density * n)))

    def buckets(self, n: int) -> int:
        """Return the buckets in a row of the sketch of n elements."""
        return max(1, round(self.width * n))

    def reduce_scatter(
        self, vector: Tensor, unit: Unit, comm: Communicator, key: MessageKey
    ) -> Tensor:
        """Sketch each chunk for its owner, and gather the positions that the owners select."""
        chunks = vector.view(comm.world_size, -1)
        n, keys = chunks.shape[1], self._keys(key)
        message = vector.new_zeros(comm.world_size, self.rows * self.buckets(n) + 1)
        for chunk, part in zip(chunks, message, strict=True):
            add_sketch(chunk, keys, part[:-1].view(self.rows, -1))
        message[:, -1] = alarm(message)
        summed = comm.reduce_scatter(message.flatten())
        selected = self._select(summed[:-1], keys, n)
        gathered = comm.all_gather(pack_positions(selected, n)).view(comm.world_size, -1)
        positions = torch.cat(
            [
                unpack_positions(packed, n, selected.numel()) + n * rank
                for rank, packed in enumerate(gathered)
            ]
        )
        result = vector.new_zeros(n)
        result[selected] = comm.reduce_scatter(_take(vector, positions))
        result[:1] += summed[-1]
        return result

    def all_reduce(self, vector: Tensor, unit: Unit, comm: Communicator, key: MessageKey) -> Tensor:  # noqa: D102
        n, keys = vector.numel(), self._keys(key)
        table = vector.new_zeros(self.rows, self.buckets(n))
        add_sketch(vector, keys, table)
        comm.all_reduce(table.view(-1))
        selected = self._select(table, keys, n)
        values = _take(vector, selected)
        comm.all_reduce(values)
        result = vector.new_zeros(n)
        result[selected] = values
        result[:1] += alarm(table)
        return result

    def _keys(self, key: MessageKey) -> list[tuple[int, int]]:
        shared = key.shared()
        return [shared._replace(unit=f"{key.unit}#{row}").words() for row in range(self.rows)]

    def _select(self, table: Tensor, keys: list[tuple[int, int]], n: int) -> Tensor:
        estimates = estimate(table.view(self.rows, -1), keys, n)
        return largest(estimates, self.elements_sent(n))[1].long()


def add_sketch(x: Tensor, keys: Keys, table: Tensor) -> None:
    """Add the sketch of `x`, float32 [n], to `table`, float32 [rows, buckets]."""
    for row, key in zip(table, keys, strict=True):
        bucket, sign = _hashes(x.numel(), len(row), key, x.device)
        if x.is_cuda:
            # sorts before it adds: atomic additions would come in any order
            row.index_put_((bucket,), x * sign, accumulate=True)
        else:
            row.index_add_(0, bucket, x * sign)


def estimate(table: Tensor, keys: Keys, n: int) -> Tensor:
    """Return the estimates of the elements 0 to n - 1: float32 [n]."""
    values = []
    for row, key in zip(table, keys, strict=True):
        bucket, sign = _hashes(n, len(row), key, table.device)
        values.append(row[bucket] * sign)
    return _median(torch.stack(values))


@compiled_on_gpus
def _median(values: Tensor) -> Tensor:
    rows, values = len(values), values.sort(0).values
    return 0.5 * values[(rows - 1) // 2] + 0.5 * values[rows // 2] + 0.0


def _hashes(
    n: int, buckets: int, key: tuple[int, int], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return bucket, int64 [n], and sign, float32 [n], of each element in a row."""
    bits = random_bits(n, *key, device)
    return ((bits >> 1) * buckets) >> 31, (1 - 2 * (bits & 1)).to(torch.float32)


def _take(vector: Tensor, positions: Tensor) -> Tensor:
    """Return the elements at `positions`, and set them to zero in `vector`."""
    values = vector[positions]
    vector[positions] = 0
    return values


def pack_positions(positions: Tensor, n: int) -> Tensor:
    """Pack ascending positions in [0, n): a count per stretch, then 16 bits per position.

    Returns:
        int32 [ceil(n / 65536) + ceil(k / 2)]: the number of positions in each stretch of 65536
        elements, then the positions modulo 65536, two to a word, the first in the lower half.
    """
    ends = torch.arange(_STRETCH, n + _STRETCH, _STRETCH, device=positions.device)
    # torch.bincount would make the host wait for a device
    counts = (
        torch.searchsorted(positions, ends).diff(prepend=positions.new_zeros(1)).to(torch.int32)
    )
    halves = torch.nn.functional.pad(positions % _STRETCH, (0, positions.numel() % 2)).view(-1, 2)
    return torch.cat([counts, (halves[:, 0] | halves[:, 1] << 16).to(torch.int32)])


def unpack_positions(packed: Tensor, n: int, k: int) -> Tensor:
    """Return the k positions that `pack_positions` packed: int64 [k]."""
    stretches = -(-n // _STRETCH)
    counts, words = packed[:stretches].long(), packed[stretches:].long()
    offsets = torch.stack([words & 0xFFFF, (words >> 16) & 0xFFFF], 1).flatten()
    starts = torch.arange(stretches, device=packed.device) * _STRETCH
    return starts.repeat_interleave(counts, output_size=k) + offsets[:k]
