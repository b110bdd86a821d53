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
            return self._fit_scattered(given, unit, wire)
        message = given.new_empty(wire.world_size, self.coefficients(n) + 1)
        for chunk, part in zip(chunks, message, strict=True):
            _project(chunk, basis, part[:-1])
        message[:, -1] = alarm(message[:, :-1])
        summed = wire.sum_scatter(message.flatten())
        for chunk, part in zip(chunks, message, strict=True):
            _add_decoded(part[:-1], basis, chunk, -1)
        result = given.new_zeros(n)
        _add_decoded(summed[:-1], basis, result, 1)
        result[:1] += summed[-1]
        return result

    def sum(self, given: Tensor, unit: Unit, wire: Communicator, key: MessageKey) -> Tensor:  # noqa: D102
        n = given.numel()
        basis = self._basis(n, unit, wire, key)
        if basis is None:
            return self._fit(given, unit, wire)
        own = given.new_empty(self.coefficients(n))
        _project(given, basis, own)
        summed = own.clone()
        wire.sum(summed)
        _add_decoded(own, basis, given, -1)
        result = given.new_zeros(n)
        _add_decoded(summed, basis, result, 1)
        return result

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

    def _fit_scattered(self, given: Tensor, unit: Unit, wire: Communicator) -> Tensor:
        result = wire.sum_scatter(given)
        # as large as the largest element, so that squares of scaled elements stay in range
        scale = (_largest(result) / wire.world_size + alarm(given)).view(1)
        wire.sum(scale)
        if not all_finite(scale):
            return result.fill_(float("nan"))
        given.zero_()
        if scale.any() and self._shortens(result.numel()):
            upper = torch.triu_indices(self.slice, self.slice, device=given.device).unbind()
            message = _second_moment(result / scale, self.slice)[upper]
            wire.sum(message)
            moment = given.new_zeros(self.slice, self.slice)
            moment[upper] = message
            self._renew(moment if wire.rank == 0 else None, unit, wire, given)
        return result

    def _fit(self, given: Tensor, unit: Unit, wire: Communicator) -> Tensor:
        result = given.clone()
        wire.sum(result)
        if not all_finite(result):
            return result.fill_(float("nan"))
        given.zero_()
        scale = _largest(result)
        if scale.any() and self._shortens(result.numel()):
            moment = _second_moment(result / scale, self.slice) if wire.rank == 0 else None
            self._renew(moment, unit, wire, given)
        return result

    def _renew(self, moment: Tensor | None, unit: Unit, wire: Communicator, like: Tensor) -> None:
        """Adopt the leading eigenvectors of the matrix (its upper triangle) of rank 0."""
        basis = like.new_zeros(self.slice, self.components)
        if moment is not None:
            # eigenvalues ascend
            vectors = torch.linalg.eigh(moment.double(), UPLO="U").eigenvectors
            basis.copy_(vectors[:, -self.components :])
        wire.sum(basis.view(-1))
        self.state[unit.name] = basis


def _largest(vector: Tensor) -> Tensor:
    largest: Tensor = torch.linalg.vector_norm(vector, ord=float("inf"))
    return largest


def _slices(vector: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the whole slices [m, size], and the rest [1, fewer than size]."""
    full = vector.numel() // size * size
    return vector[:full].view(-1, size), vector[full:].view(1, -1)


def _project(vector: Tensor, basis: Tensor, out: Tensor) -> None:
    """Set `out` to U^T s for every slice s of the vector."""
    components = basis.shape[1]
    whole, rest = _slices(vector, len(basis))
    torch.mm(whole, basis, out=out[: len(whole) * components].view(-1, components))
    if rest.numel():
        torch.mm(rest, basis[: rest.shape[1]], out=out[-components:].view(1, -1))


def _add_decoded(coefficients: Tensor, basis: Tensor, out: Tensor, alpha: int) -> None:
    """Add alpha * U c to every slice of `out`."""
    rows = coefficients.view(-1, basis.shape[1])
    whole, rest = _slices(out, len(basis))
    whole.addmm_(rows[: len(whole)], basis.T, alpha=alpha)
    if rest.numel():
        rest.addmm_(rows[-1:], basis[: rest.shape[1]].T, alpha=alpha)


def _second_moment(vector: Tensor, size: int) -> Tensor:
    """Return the sum of s s^T over the slices s: float32 [size, size]."""
    whole, rest = _slices(vector, size)
    moment = whole.T @ whole
    moment[: rest.shape[1], : rest.shape[1]] += rest.T @ rest
    return moment
