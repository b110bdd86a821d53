"""Low-rank factors of every parameter's gradient: `powersgd`."""

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
    """rows of it in one chunk, padding included"""
    offset: int

    def parts(self, chunks: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield its rows by chunk, without padding: their numbers, and a view [rows, columns]."""
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
    """Factors that all ranks have."""

    pairs: list[tuple[Tensor, Tensor]]
    """P^T and the summed Q^T of every matrix"""
    alarm: Tensor
    """float32 []: NaN where a number is not finite on some rank, else 0"""


class _MatrixLayout(NamedTuple):
    matrices: list[_Matrix]
    exact: list[slice]
    """parts of a chunk that are sent uncompressed"""


class PowerSgd(MultiPhaseMethod):
    """sent_r = P Q_r^T for the matrix M_r of each parameter; the result is P (sum Q_r)^T.

    Vogels et al. 2019 (algorithm 1), on matrices [first dimension, all others]:
    1. P = sum over ranks of M_r Q, with Q [columns, rank] of the step before (warm start);
    2. P becomes orthonormal (Householder QR in float64);
    3. Q_r = M_r^T P, and Q = sum over ranks of Q_r.
    The residual of a rank is M_r - P Q_r^T (its own Q_r, as in the authors' library): sent and
    residual sum to the input exactly. The columns of the Q for the next step are normalized, which
    changes no subspace and keeps P in range; a column of zeros is drawn anew from the message's
    key, as is the first Q. All matrices of a unit share the message of a phase. Ranks are expected
    to run on hosts of one kind, where products of matrices have the same bytes.

    Biased; a contraction with delta the share of |M|^2 in the subspace of P, at best that of the
    `rank` largest singular values; it needs error feedback. Bits per element of an all-reduce:
    32 * rank * (rows + columns) / (rows * columns). A reduce-scatter moves twice that, relative to
    its own uncompressed bytes: every rank needs the whole P and Q, of which each is an all-reduce.
    (Scattering P, orthonormalising it by an all-reduced Gram matrix and gathering it moves the same
    bytes of P, and the Gram matrix, in four dependent phases instead of two.) A block that
    would not be shorter so, vectors among them, is sent uncompressed.

    Args:
        rank: columns of P and Q.
    """

    name = "powersgd"

    def __init__(self, rank: int = 4) -> None:
        super().__init__()
        self.rank = rank

    def sum_scatter(self, given: Tensor, unit: Unit, wire: Communicator, key: MessageKey) -> Tensor:  # noqa: D102
        chunks = given.view(wire.world_size, -1)
        layout = self._layout(unit, chunks, wire, times=2)
        exact = _cut(chunks, layout.exact)
        factors = self._factor(chunks, layout.matrices, alarm(exact).view(1), unit, wire, key)
        sums = wire.sum_scatter(exact.flatten()) if exact.numel() else exact
        return _assemble(chunks, layout, factors, sums, wire.rank)

    def sum(self, given: Tensor, unit: Unit, wire: Communicator, key: MessageKey) -> Tensor:
        """Sum in two phases; uncompressed blocks share the message of the first."""
        chunks = given.view(1, -1)
        layout = self._layout(unit, chunks, wire, times=1)
        exact = _cut(chunks, layout.exact).view(-1)
        factors = self._factor(chunks, layout.matrices, exact, unit, wire, key)
        return _assemble(chunks, layout, factors, exact, 0)

    def _layout(self, unit: Unit, chunks: Tensor, wire: Communicator, times: int) -> _MatrixLayout:
        """Decide which blocks are factored.

        Args:
            times: bytes sent for a number of P or Q, relative to a number of the vector.
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
                f"{self.name}: unit {unit.name!r} has blocks of {offset} elements per chunk, the "
                f"vector {chunks.shape[1]}"
            )
        if not matrices:
            wire.uncompressed(f"no matrix that rank {self.rank} makes shorter")
            return _MatrixLayout([], [slice(0, chunks.shape[1])])
        return _MatrixLayout(matrices, exact)

    def _factor(
        self,
        chunks: Tensor,
        matrices: list[_Matrix],
        rider: Tensor,
        unit: Unit,
        wire: Communicator,
        key: MessageKey,
    ) -> _Factors:
        """Return the factors of every matrix; subtract what is sent from `chunks`.

        Transposed, since products with thin matrices are many times faster along their rows.

        Args:
            rider: summed in place, in the message of the first phase.
        """
        warm = [self._warm(unit, matrix, key, chunks.device) for matrix in matrices]
        message = chunks.new_empty(self.rank * sum(m.rows for m in matrices) + rider.numel())
        *lefts, end = _thin(message, [m.rows for m in matrices], self.rank)
        for matrix, q, left in zip(matrices, warm, lefts, strict=True):
            for rows, part in matrix.parts(chunks):
                torch.mm(q, part.T, out=left[:, rows])
        end.copy_(rider)
        wire.sum(message)
        wrong = alarm(message)
        rider.copy_(end)
        # orthonormal rows of the same span, arbitrary where rows are dependent
        lefts = [torch.linalg.qr(left.double().T).Q.T.float().contiguous() for left in lefts]

        own = chunks.new_zeros(self.rank * sum(m.columns for m in matrices))
        summed = own.clone()
        *owns, _ = _thin(own, [m.columns for m in matrices], self.rank)
        for matrix, p, right in zip(matrices, lefts, owns, strict=True):
            for rows, part in matrix.parts(chunks):
                right.addmm_(p[:, rows], part)
        if matrices:
            summed.copy_(own)
            wire.sum(summed)
        wrong = wrong + alarm(summed)
        for matrix, p, right in zip(matrices, lefts, owns, strict=True):
            for rows, part in matrix.parts(chunks):
                part.addmm_(p[:, rows].T, right, alpha=-1)
        *rights, _ = _thin(summed, [m.columns for m in matrices], self.rank)
        for matrix, right, before in zip(matrices, rights, warm, strict=True):
            after = self._normal(right, matrix, key)
            self.state[f"{unit.name}/{matrix.name}"] = after.where(wrong == 0, before)
        return _Factors(list(zip(lefts, rights, strict=True)), wrong)

    def _warm(self, unit: Unit, matrix: _Matrix, key: MessageKey, device: torch.device) -> Tensor:
        known = self.state.get(f"{unit.name}/{matrix.name}")
        if known is None:
            return self._drawn(matrix, key, device)
        if known.shape[1] != matrix.columns:
            raise UserError(
                f"{self.name}: the state of {matrix.name!r} is of {known.shape[1]} columns, the "
                f"parameter has {matrix.columns}: load the state of this model"
            )
        return known

    def _normal(self, right: Tensor, matrix: _Matrix, key: MessageKey) -> Tensor:
        """Normalize rows; redraw rows of zeros, which would stay zeros forever."""
        lengths = right.double().norm(dim=1, keepdim=True)
        lost = lengths == 0
        normal: Tensor = (right / lengths.where(~lost, 1.0)).float()
        if right.device.type != "cpu" or lost.any():  # the host would wait for another device
            normal = normal.where(~lost, self._drawn(matrix, key, right.device))
        return normal

    def _drawn(self, matrix: _Matrix, key: MessageKey, device: torch.device) -> Tensor:
        words = key.shared()._replace(unit=f"{key.unit}/{matrix.name}").words()
        return uniform(self.rank * matrix.columns, *words, device).view(self.rank, -1) - 0.5


def _thin(message: Tensor, lengths: list[int], rank: int) -> list[Tensor]:
    """Return views of consecutive matrices [rank, length], and of the rest of the message."""
    sizes = [rank * length for length in lengths]
    *thin, end = message.split([*sizes, message.numel() - sum(sizes)])
    return [*(each.view(rank, -1) for each in thin), end]


def _cut(chunks: Tensor, spans: list[slice]) -> Tensor:
    """Copy the given spans of every chunk: [chunks, sum of lengths]."""
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
    own = result.view(1, -1)
    for matrix, (p, q) in zip(layout.matrices, factors.pairs, strict=True):
        # the rows of this chunk, as of a vector with this chunk alone
        first = index * matrix.height
        alone = matrix._replace(rows=max(0, min(matrix.height, matrix.rows - first)))
        for rows, part in alone.parts(own):
            torch.mm(p[:, first:][:, rows].T, q, out=part)
    start = 0
    for span in layout.exact:
        size = span.stop - span.start
        result[span] = exact.view(-1)[start : start + size]
        chunks[:, span] = 0
        start += size
    result[:1] += factors.alarm
    return result
