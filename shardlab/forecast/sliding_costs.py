"""Bytes of host memory that `slide` moves for a unit: copies, sums and updates.

Sources: `shardlab.engines.slide` (copies in and out, updates). The closed forms
of a step follow: with P parameters, N units of G elements of which K stay, W ranks of a node, b
bytes of a parameter on the device and l of a gradient, a rank copies b (P + (N - K) G) in and l P
out, a W-th of either where ranks gather or reduce on the device. An update moves 28 bytes per
element in float32 (parameter and two moments read and written, gradient read).
"""

from shardlab.config.settings import DTYPE_BYTES
from shardlab.forecast.costs import Costs
from shardlab.forecast.schedule import Phase
from shardlab.forecast.work import Work
from shardlab.models.slide_buffers import gradient_bytes, gradient_vectors, kept_gradients

_FLOAT = DTYPE_BYTES["fp32"]
_MOMENTS = 2

Phases = tuple[Phase, ...]


class Movements:
    """Phases of a unit by its number; the root is 0."""

    def __init__(self, work: Work, costs: Costs) -> None:
        full, self._work = work.strategy, work
        self._costs, self._inside, self._across = costs, costs.inside, costs.across
        self._ranks = ranks = self._inside.world_size
        self._arriving = work.weights.element_bytes
        self._landed = gradient_bytes(full, self._arriving, ranks)
        self.keeping = kept_gradients(work.accumulation, work.holding)
        plain = full.gradients.plain() and full.gradients.route == "native"
        self._vectors = gradient_vectors(full, ranks)
        self._summed = self._vectors if plain else 1
        """whether an update sums vectors in shared memory instead of exchanging messages"""
        self._moment = DTYPE_BYTES[full.moment_dtype]

    def arrival(self, unit: int) -> Phases:
        """Copy the parameters to the device."""
        nbytes = self._elements(unit) * self._arriving
        if self._work.strategy.param_transfer == "full" or self._ranks == 1:
            return (self._costs.move("copy", nbytes),)
        own = self._costs.move("copy", nbytes / self._ranks)
        return own, *self._inside.gather(self._elements(unit), self._work.weights)

    def collection(self, unit: int) -> Phases:
        """Copy the gradients on the device into the outgoing vector."""
        return (self._costs.collect(self._elements(unit) * self._landed),)

    def departure(self, unit: int) -> Phases:
        """Copy the gradients from the device."""
        nbytes = self._elements(unit) * self._landed
        if not self._reduces:
            return (self._costs.move("copy", nbytes),)
        reduced = self._inside.reduce_scatter(self._elements(unit), self._work.gradients.inside)
        return *reduced, self._costs.move("copy", nbytes / self._ranks)

    def landing(self, unit: int, first: bool, last: bool) -> Phases:
        """Process gradients that have arrived, of the first or the last micro-batch."""
        chunk, phases = self._chunk(unit), []
        adding = _FLOAT * (1 if first else 2)
        if self.keeping == "sums":
            added = chunk if self._reduces else self._elements(unit)
            phases.append(self._pass(added * (self._landed + adding)))
        if last:
            phases += self._over_ranks(unit)
            average = self._work.gradients.inside._replace(element_bytes=_FLOAT)
            phases += self._across.all_reduce(round(chunk), average)
            phases.append(self._pass(chunk * self._gradients))  # read once for the norm
        return tuple(phases)

    def update(self, unit: int) -> Phases:
        """Update this rank's part."""
        mirror = 0 if self._arriving == _FLOAT else self._arriving
        moved = 2 * (_FLOAT + _MOMENTS * self._moment) + self._gradients + mirror
        return (self._pass(self._chunk(unit) * moved),)

    @property
    def _reduces(self) -> bool:
        """Return whether gradients are reduced on the device."""
        return self._work.strategy.grad_sync == "gpu_reduce" and self._ranks > 1

    @property
    def _gradients(self) -> int:
        """Return the bytes moved per element of the summed gradient."""
        if self._across.world_size > 1:
            return _FLOAT
        return self._summed * (_FLOAT if self.keeping == "sums" else self._landed)

    def _over_ranks(self, unit: int) -> Phases:
        """Exchange gradients as messages, where they are not summed in shared memory."""
        if self._summed == self._vectors:
            return ()
        return self._inside.reduce_scatter(self._elements(unit), self._work.gradients.inside)

    def _pass(self, nbytes: float) -> Phase:
        return self._costs.move("update", nbytes)

    def _elements(self, unit: int) -> int:
        return self._work.units[unit]

    def _chunk(self, unit: int) -> float:
        return self._elements(unit) / self._ranks
