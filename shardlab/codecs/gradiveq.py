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

    The linear compressor of Yu et al. 2018, without a mean and with one U for a unit. Each chunk of
    n elements is cut into m = ceil(n / slice) slices, the last filled up with zeros; U is float32
    [slice, components]. The coefficients U^T x_r are linear in x_r, so they are summed on the wire.
    Step 0 and every `refresh`-th step after it are sent uncompressed: then U becomes the leading
    eigenvectors of sum s s^T over the slices s of the sum. Rank 0 finds them and sends them to all,
    so that ranks on hosts of different kinds hold the same bytes. A sum of zeros leaves U as it
    was; without a U the next step is uncompressed too.

    Biased; a contraction as far as the subspace of U holds the slices (|x - sent| <= |x|), so it
    needs error feedback. Bits per element: 32 * components / slice, plus 32 bits for each chunk;
    per refresh 32 bits per element and an all-reduce of slice * components numbers (after a
    reduce-scatter of slice * (slice + 1) / 2 + 1 more).

    Args:
        slice: elements of a slice.
        components: coefficients that are sent for a slice.
        refresh: steps from one uncompressed step to the next.
    """

    name = "gradiveq"

    def __init__(self, slice: int = 256, components: int = 32, refresh: int = 50) -> None:
        super().__init__()
        self.slice = slice
        self.components = components
        self.refresh = refresh

    def coefficients(self, n: int) -> int:
        """Return how many numbers are sent for n elements."""
        return -(-n // self.slice) * self.components

    def sum_scatter(self, given: Tensor, unit: Unit, wire: Communicator, key: MessageKey) -> Tensor:  # noqa: D102
        chunks = given.view(wire.world_size, -1)
        n = chunks.shape[1]
        basis = self._basis(n, unit, wire, key)
        if basis is None:
            return self._fit(given, unit, wire, scattered=True)
        message = given.new_empty(wire.world_size, self.coefficients(n) + 1)
        own = message[:, :-1]
        _project(chunks, basis, own)
        message[:, -1] = alarm(own)
        summed = wire.sum_scatter(message.flatten())
        _add_decoded(own, basis, chunks, -1)
        result = given.new_zeros(1, n)
        _add_decoded(summed[None, :-1], basis, result, 1)
        result[0, :1] += summed[-1]
        return result[0]

    def sum(self, given: Tensor, unit: Unit, wire: Communicator, key: MessageKey) -> Tensor:  # noqa: D102
        n = given.numel()
        basis = self._basis(n, unit, wire, key)
        if basis is None:
            return self._fit(given, unit, wire, scattered=False)
        own = given.new_empty(1, self.coefficients(n))
        _project(given[None], basis, own)
        summed = own.clone()
        wire.sum(summed[0])
        _add_decoded(own, basis, given[None], -1)
        result = given.new_zeros(1, n)
        _add_decoded(summed, basis, result, 1)
        return result[0]

    def _basis(self, n: int, unit: Unit, wire: Communicator, key: MessageKey) -> Tensor | None:
        """Return the basis for this message; None where it is sent uncompressed."""
        if not self._shortens(n):
            wire.uncompressed("no longer than its coefficients")
            return None
        if key.step % self.refresh == 0 or unit.name not in self.state:
            wire.uncompressed("renews the principal components")
            return None
        return self.state[unit.name]

    def _shortens(self, n: int) -> bool:
        return self.coefficients(n) < n

    def _fit(self, given: Tensor, unit: Unit, wire: Communicator, scattered: bool) -> Tensor:
        """Return the exact sum, or this rank's chunk of it; renew the basis."""
        # scaled by about the largest element, so that squares stay in range
        if scattered:
            result = wire.sum_scatter(given)
            scale = (_largest(result) / wire.world_size + alarm(given)).view(1)
            wire.sum(scale)
        else:
            result = given.clone()
            wire.sum(result)
            scale = _largest(result)
        if not all_finite(scale):
            return result.fill_(float("nan"))
        given.zero_()
        if not scale.any() or not self._shortens(result.numel()):
            return result
        if scattered or wire.rank == 0:
            moment = _second_moment(result / scale, self.slice)
        if scattered:  # the upper triangle
            upper = torch.triu_indices(self.slice, self.slice, device=given.device).unbind()
            message = moment[upper]
            wire.sum(message)
            moment[upper] = message
        basis = given.new_zeros(self.slice, self.components)
        if wire.rank == 0:
            # eigenvalues ascend
            vectors = torch.linalg.eigh(moment.double(), UPLO="U").eigenvectors
            basis.copy_(vectors[:, -self.components :])
        wire.sum(basis.view(-1))
        self.state[unit.name] = basis
        return result


def _largest(vector: Tensor) -> Tensor:
    largest: Tensor = torch.linalg.vector_norm(vector, ord=float("inf"))
    return largest


def _slices(vector: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the whole slices [m, size], and the rest [1, fewer than size]."""
    full = vector.numel() // size * size
    return vector[:full].view(-1, size), vector[full:].view(1, -1)


def _project(chunks: Tensor, basis: Tensor, out: Tensor) -> None:
    """Set the rows of `out` to U^T s for every slice s of each chunk."""
    components = basis.shape[1]
    for chunk, coefficients in zip(chunks, out, strict=True):
        whole, rest = _slices(chunk, len(basis))
        torch.mm(whole, basis, out=coefficients[: len(whole) * components].view(-1, components))
        if rest.numel():
            torch.mm(rest, basis[: rest.shape[1]], out=coefficients[-components:].view(1, -1))


def _add_decoded(coefficients: Tensor, basis: Tensor, out: Tensor, alpha: int) -> None:
    """Add alpha * U c to every slice of each row of `out`."""
    for row, chunk in zip(coefficients, out, strict=True):
        rows = row.view(-1, basis.shape[1])
        whole, rest = _slices(chunk, len(basis))
        whole.addmm_(rows[: len(whole)], basis.T, alpha=alpha)
        if rest.numel():
            rest.addmm_(rows[-1:], basis[: rest.shape[1]].T, alpha=alpha)


def _second_moment(vector: Tensor, size: int) -> Tensor:
    """Return the sum of s s^T over the slices s: float32 [size, size]."""
    whole, rest = _slices(vector, size)
    moment = whole.T @ whole
    moment[: rest.shape[1], : rest.shape[1]] += rest.T @ rest
    return moment
