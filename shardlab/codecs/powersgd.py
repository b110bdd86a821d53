"""Low-rank factors of the gradient of each parameter: `powersgd`."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from shardlab.codecs.base import MessageKey, Unit
from shardlab.codecs.multi_phase import Communicator, MultiPhaseMethod, alarm
from shardlab.core.errors import UserError
from shardlab.kernels.random import uniform


class _Matrix(NamedTuple):
    """Position of a factored block in a chunk."""

    name: str
    rows: int
    columns: int
    height: int
    """Rows of the block in one chunk, padding included."""
    offset: int
    """Elements before the block in a chunk."""

    def parts(self, chunks: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield row numbers and a view [rows, columns] for each chunk, without padding."""
        for index, chunk in enumerate(chunks):
            first = index * self.height
            count = min(self.height, self.rows - first)
            if count > 0:
                stop = self.offset + count * self.columns
                yield (
                    slice(first, first + count),
                    chunk[self.offset : stop].view(count, self.columns),
                )


class _Factors(NamedTuple):
    """Factors that are equal on all ranks."""

    pairs: list[tuple[Tensor, Tensor]]
    """P^T [rank, rows] and the summed Q^T [rank, columns] of each matrix."""
    alarm: Tensor
    """float32 []: NaN if a value on any rank is not finite, else 0."""


class _MatrixLayout(NamedTuple):
    matrices: list[_Matrix]
    """Blocks that are factored."""
    exact: list[slice]
    """Parts of a chunk that are sent uncompressed."""


class PowerSgd(MultiPhaseMethod):
    """sent_r = P Q_r^T for the matrix M_r of each parameter; the result is P (sum Q_r)^T.

    Vogels et al. 2019 (algorithm 1), on matrices [first dimension, product of the others]:
    1. P = sum over ranks of M_r Q, with Q [columns, rank] from the previous step (warm start).
    2. P becomes orthonormal (Householder QR in float64).
    3. Q_r = M_r^T P, and Q = sum over ranks of Q_r.

    The residual of a rank is M_r - P Q_r^T (with the rank's Q_r, as in the authors' library), so
    sent part and residual add up to the input exactly. The columns of the next step's Q are
    normalized: this keeps P in range and does not change its subspace. The first Q is drawn at
    random from the key of the message; a column of zeros is replaced by such a random column. The
    matrices of a unit share the message of a phase. All ranks should run on the same kind of host,
    since other hosts may round products of matrices differently.

    Biased. A contraction with delta the fraction of |M|^2 in the subspace of P, at best the
    fraction in the `rank` largest singular values, so it needs error feedback. Bits per element of
    an all-reduce: 32 * rank * (rows + columns) / (rows * columns). A reduce-scatter moves twice
    that, relative to its uncompressed bytes: every rank needs all rows of P and Q, and each takes
    an all-reduce. (To scatter P, orthonormalize it by an all-reduced Gram matrix and gather it
    would move the same bytes of P, and the Gram matrix, in four dependent phases instead of two.)
    Vectors, and other blocks that factors do not make shorter, are sent uncompressed.

    Args:
        rank: Columns of P and Q.
    """

    name = "powersgd"

    def __init__(self, rank: int = 4) -> None:
        super().__init__()
        self.rank = rank

    def reduce_scatter(  # noqa: D102
        self, vector: Tensor, unit: Unit, comm: Communicator, key: MessageKey
    ) -> Tensor:
        chunks = vector.view(comm.world_size, -1)
        layout = self._layout(unit, chunks, comm, times=2)
        exact = _cut(chunks, layout.exact)
        factors = self._factor(chunks, layout.matrices, alarm(exact).view(1), unit, comm, key)
        sums = comm.reduce_scatter(exact.flatten()) if exact.numel() else exact
        return _assemble(chunks, layout, factors, sums, comm.rank)

    def all_reduce(self, vector: Tensor, unit: Unit, comm: Communicator, key: MessageKey) -> Tensor:
        """Sum in two phases; uncompressed blocks share the message of the first."""
        chunks = vector.view(1, -1)
        layout = self._layout(unit, chunks, comm, times=1)
        exact = _cut(chunks, layout.exact).view(-1)
        factors = self._factor(chunks, layout.matrices, exact, unit, comm, key)
        return _assemble(chunks, layout, factors, exact, 0)

    def _layout(self, unit: Unit, chunks: Tensor, comm: Communicator, times: int) -> _MatrixLayout:
        """Return the blocks to factor and the parts of a chunk to send uncompressed.

        Args:
            times: Bytes sent for a number of P or Q, relative to a number of the vector.
        """
        matrices, exact, offset = [], [], 0
        for block, size in zip(unit.blocks, unit.chunk_sizes(len(chunks)), strict=True):
            factors = times * self.rank * (block.rows + block.columns)
            if factors < block.rows * block.columns:
                height = -(-block.rows // len(chunks))
                matrices.append(_Matrix(*block, height, offset))
            else:
                exact.append(slice(offset, offset + size))
            offset += size
        if unit.blocks and offset != chunks.shape[1]:
            raise ValueError(
                f"{self.name}: blocks of unit {unit.name!r} have {offset} elements per chunk, but "
                f"the vector has {chunks.shape[1]}"
            )
        if not matrices:
            comm.report_uncompressed(f"no matrix that rank {self.rank} makes shorter")
            return _MatrixLayout([], [slice(0, chunks.shape[1])])
        return _MatrixLayout(matrices, exact)

    def _factor(
        self,
        chunks: Tensor,
        matrices: list[_Matrix],
        rider: Tensor,
        unit: Unit,
        comm: Communicator,
        key: MessageKey,
    ) -> _Factors:
        """Return the factors of each matrix; subtract what is sent from `chunks`.

        Factors are stored transposed: products with thin matrices are many times faster along
        their rows.

        Args:
            rider: Summed in place, in the message of the first phase.
        """
        previous = [self._previous(unit, matrix, key, chunks.device) for matrix in matrices]
        message = chunks.new_empty(self.rank * sum(m.rows for m in matrices) + rider.numel())
        *ps, end = _factor_views(message, [m.rows for m in matrices], self.rank)
        for matrix, q, p in zip(matrices, previous, ps, strict=True):
            for rows, part in matrix.parts(chunks):
                torch.mm(q, part.T, out=p[:, rows])
        end.copy_(rider)
        comm.all_reduce(message)
        not_finite = alarm(message)
        rider.copy_(end)
        # orthonormal rows of the same span, arbitrary where rows are dependent
        ps = [torch.linalg.qr(p.double().T).Q.T.float().contiguous() for p in ps]

        local = chunks.new_zeros(self.rank * sum(m.columns for m in matrices))
        summed = local.clone()
        *local_qs, _ = _factor_views(local, [m.columns for m in matrices], self.rank)
        for matrix, p, q in zip(matrices, ps, local_qs, strict=True):
            for rows, part in matrix.parts(chunks):
                q.addmm_(p[:, rows], part)
        if matrices:
            summed.copy_(local)
            comm.all_reduce(summed)
        not_finite = not_finite + alarm(summed)
        for matrix, p, q in zip(matrices, ps, local_qs, strict=True):
            for rows, part in matrix.parts(chunks):
                part.addmm_(p[:, rows].T, q, alpha=-1)
        *qs, _ = _factor_views(summed, [m.columns for m in matrices], self.rank)
        for matrix, q, before in zip(matrices, qs, previous, strict=True):
            # a step that is not finite leaves the warm start as it was
            after = self._normalized(q, matrix, key)
            self.state[f"{unit.name}/{matrix.name}"] = after.where(not_finite == 0, before)
        return _Factors(list(zip(ps, qs, strict=True)), not_finite)

    def _previous(
        self, unit: Unit, matrix: _Matrix, key: MessageKey, device: torch.device
    ) -> Tensor:
        """Return Q^T of the previous step, or a random one in the first step."""
        q = self.state.get(f"{unit.name}/{matrix.name}")
        if q is None:
            return self._random_factor(matrix, key, device)
        if q.shape[1] != matrix.columns:
            raise UserError(
                f"{self.name}: the state of {matrix.name!r} has {q.shape[1]} columns, but the "
                f"parameter has {matrix.columns}: load the state of this model"
            )
        return q

    def _normalized(self, q: Tensor, matrix: _Matrix, key: MessageKey) -> Tensor:
        """Normalize rows; replace rows of zeros, which would stay zero in all later steps."""
        lengths = q.double().norm(dim=1, keepdim=True)
        zero = lengths == 0
        normalized: Tensor = (q / lengths.where(~zero, 1.0)).float()
        # on a GPU always: to ask whether a row is zero, the host would wait for the device
        if q.device.type != "cpu" or zero.any():
            normalized = normalized.where(~zero, self._random_factor(matrix, key, q.device))
        return normalized

    def _random_factor(self, matrix: _Matrix, key: MessageKey, device: torch.device) -> Tensor:
        words = key.shared()._replace(unit=f"{key.unit}/{matrix.name}").words()
        return uniform(self.rank * matrix.columns, *words, device).view(self.rank, -1) - 0.5


def _factor_views(message: Tensor, lengths: list[int], rank: int) -> list[Tensor]:
    """Return views of consecutive matrices [rank, length], then of the end of the message."""
    sizes = [rank * length for length in lengths]
    *factors, end = message.split([*sizes, message.numel() - sum(sizes)])
    return [*(factor.view(rank, -1) for factor in factors), end]


def _cut(chunks: Tensor, spans: list[slice]) -> Tensor:
    """Copy the spans of every chunk: [chunks, sum of lengths]."""
    parts = [chunks[:, span] for span in spans]
    return torch.cat(parts, 1) if parts else chunks.new_empty(len(chunks), 0)


def _assemble(
    chunks: Tensor,
    layout: _MatrixLayout,
    factors: _Factors,
    exact: Tensor,
    index: int,
) -> Tensor:
    """Return chunk `index` of the result; zero the uncompressed parts of `chunks`."""
    result = torch.zeros_like(chunks[0])
    for matrix, (p, q) in zip(layout.matrices, factors.pairs, strict=True):
        # the rows of the matrix in this chunk, as a matrix of a vector that is one chunk
        first = index * matrix.height
        local = matrix._replace(rows=max(0, min(matrix.height, matrix.rows - first)))
        for rows, part in local.parts(result.view(1, -1)):
            torch.mm(p[:, first:][:, rows].T, q, out=part)
    start = 0
    for span in layout.exact:
        size = span.stop - span.start
        result[span] = exact.view(-1)[start : start + size]
        chunks[:, span] = 0
        start += size
    result[:1] += factors.alarm
    return result
