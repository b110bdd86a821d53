"""Projection of slices onto few principal components: `gradiveq`."""

import torch
from torch import Tensor

from shardlab.codecs.base import MessageKey, Unit
from shardlab.codecs.multi_phase import (
    Communicator,
    MultiPhaseMethod,
    alarm,
    all_finite,
)


class GradiVeQ(MultiPhaseMethod):
    """sent_r = U U^T x_r for each slice of x_r, with U the principal components of past slices.

    The linear compressor of Yu et al. 2018, without a mean and with one U per unit. Each chunk of
    n elements is cut into m = ceil(n / slice) slices, the last padded with zeros. U is float32
    [slice, components]. The coefficients U^T x_r are linear in x_r, so they are summed on the wire.

    Step 0 and every `refresh`-th step after it are sent uncompressed. U then becomes the leading
    eigenvectors of the sum of s s^T over the slices s of the result. Rank 0 computes them and sends
    them to all ranks, so that different kinds of hosts hold the same bytes. If the result is zero,
    U does not change; if there was no U, the next step is also sent uncompressed.

    Biased. A contraction (|x - sent| <= |x|), the stronger the more of the slices lies in the
    subspace of U, so it needs error feedback. Bits per element: 32 * components / slice, plus 32
    bits per chunk. A refresh sends 32 bits per element and an all-reduce of slice * components
    numbers; with a reduce-scatter, slice * (slice + 1) / 2 + 1 numbers more.

    Args:
        slice: Elements of a slice.
        components: Coefficients sent per slice.
        refresh: Steps from one uncompressed step to the next.
    """

    name = "gradiveq"

    def __init__(self, slice: int = 256, components: int = 32, refresh: int = 50) -> None:
        super().__init__()
        self.slice = slice
        self.components = components
        self.refresh = refresh

    def coefficients(self, n: int) -> int:
        """Return the number of coefficients sent for n elements."""
        return -(-n // self.slice) * self.components

    def reduce_scatter(  # noqa: D102
        self, vector: Tensor, unit: Unit, comm: Communicator, key: MessageKey
    ) -> Tensor:
        chunks = vector.view(comm.world_size, -1)
        n = chunks.shape[1]
        basis = self._basis(n, unit, comm, key)
        if basis is None:
            return self._fit(vector, unit, comm, scattered=True)
        message = vector.new_empty(comm.world_size, self.coefficients(n) + 1)
        coefficients = message[:, :-1]
        _project(chunks, basis, coefficients)
        message[:, -1] = alarm(coefficients)
        summed = comm.reduce_scatter(message.flatten())
        _add_decoded(coefficients, basis, chunks, -1)
        result = vector.new_zeros(1, n)
        _add_decoded(summed[None, :-1], basis, result, 1)
        # NaN if a coefficient of any rank was not finite
        result[0, :1] += summed[-1]
        return result[0]

    def all_reduce(self, vector: Tensor, unit: Unit, comm: Communicator, key: MessageKey) -> Tensor:  # noqa: D102
        n = vector.numel()
        basis = self._basis(n, unit, comm, key)
        if basis is None:
            return self._fit(vector, unit, comm, scattered=False)
        coefficients = vector.new_empty(1, self.coefficients(n))
        _project(vector[None], basis, coefficients)
        summed = coefficients.clone()
        comm.all_reduce(summed[0])
        _add_decoded(coefficients, basis, vector[None], -1)
        result = vector.new_zeros(1, n)
        _add_decoded(summed, basis, result, 1)
        return result[0]

    def _basis(self, n: int, unit: Unit, comm: Communicator, key: MessageKey) -> Tensor | None:
        """Return U for this message, or None if the message is sent uncompressed."""
        if not self._shortens(n):
            comm.report_uncompressed("no longer than its coefficients")
            return None
        if key.step % self.refresh == 0 or unit.name not in self.state:
            comm.report_uncompressed("renews the principal components")
            return None
        return self.state[unit.name]

    def _shortens(self, n: int) -> bool:
        return self.coefficients(n) < n

    def _fit(self, vector: Tensor, unit: Unit, comm: Communicator, scattered: bool) -> Tensor:
        """Return the exact sum, or this rank's chunk of it; replace U.

        Args:
            scattered: Return this rank's chunk, as `reduce_scatter` does.
        """
        # vectors are divided by about their largest element, so that squares stay in range
        if scattered:
            result = comm.reduce_scatter(vector)
            scale = (_largest(result) / comm.world_size + alarm(vector)).view(1)
            comm.all_reduce(scale)
        else:
            result = vector.clone()
            comm.all_reduce(result)
            scale = _largest(result)
        if not all_finite(scale):
            return result.fill_(float("nan"))
        vector.zero_()
        if not scale.any() or not self._shortens(result.numel()):
            return result
        if scattered or comm.rank == 0:
            moment = _second_moment(result / scale, self.slice)
        if scattered:
            # the matrix is symmetric: its upper triangle is enough
            upper = torch.triu_indices(self.slice, self.slice, device=vector.device).unbind()
            message = moment[upper]
            comm.all_reduce(message)
            moment[upper] = message
        basis = vector.new_zeros(self.slice, self.components)
        if comm.rank == 0:
            # eigenvalues ascend: the leading eigenvectors are the last columns
            vectors = torch.linalg.eigh(moment.double(), UPLO="U").eigenvectors
            basis.copy_(vectors[:, -self.components :])
        # a broadcast: the other ranks add zeros
        comm.all_reduce(basis.view(-1))
        self.state[unit.name] = basis
        return result


def _largest(vector: Tensor) -> Tensor:
    largest: Tensor = torch.linalg.vector_norm(vector, ord=float("inf"))
    return largest


def _slices(vector: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return views of the full slices [m, size] and of the shorter last slice [1, < size]."""
    border = vector.numel() // size * size
    return vector[:border].view(-1, size), vector[border:].view(1, -1)


def _project(chunks: Tensor, basis: Tensor, out: Tensor) -> None:
    """Set the rows of `out` to U^T s for every slice s of each chunk."""
    components = basis.shape[1]
    for chunk, coefficients in zip(chunks, out, strict=True):
        full, last = _slices(chunk, len(basis))
        torch.mm(full, basis, out=coefficients[: len(full) * components].view(-1, components))
        if last.numel():
            torch.mm(last, basis[: last.shape[1]], out=coefficients[-components:].view(1, -1))


def _add_decoded(coefficients: Tensor, basis: Tensor, out: Tensor, alpha: int) -> None:
    """Add alpha * U c to every slice of each row of `out`."""
    for row, chunk in zip(coefficients, out, strict=True):
        rows = row.view(-1, basis.shape[1])
        full, last = _slices(chunk, len(basis))
        full.addmm_(rows[: len(full)], basis.T, alpha=alpha)
        if last.numel():
            last.addmm_(rows[-1:], basis[: last.shape[1]].T, alpha=alpha)


def _second_moment(vector: Tensor, size: int) -> Tensor:
    """Return the sum of s s^T over the slices s: float32 [size, size]."""
    full, last = _slices(vector, size)
    moment = full.T @ full
    moment[: last.shape[1], : last.shape[1]] += last.T @ last
    return moment
