"""Result: a measurement of one strategy, or its failure.

Every measurement writes results, and reports, predictions, searches and comparisons read only
results. A result has a header, which says what ran, on which link and on which machine, and a body:

- `train_result.TrainResult`, kind `train` or `trial`: a training run of one seed;
- `tune_result.TuneResult`, kind `tune`: a training run that tunes a method;
- `timing_result.TimingResult`, kind `timing` or `race`: interleaved steps with other strategies;
- `Failure`, of any kind: the outcome and the error in place of figures.

A file of results is JSON lines, one flat object each: `files.read_results` and
`files.write_results`. Lines of another version of this form are refused, with the command that
regenerates them.
"""

from collections.abc import Iterable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field

from shardlab.core.document import Document
from shardlab.core.files import finite

SCHEMA_VERSION = 4

Finite = Annotated[float | None, BeforeValidator(finite)]
"""Number, or None where it is not finite, as in a run that diverged: JSON has no such number."""

LinkEmulation = Literal["none", "namespaces", "in-process"]
"""none: the link is real; namespaces: the kernel delays packets; in-process: collectives end at
issue + delay + bytes / rate."""

Kind = Literal["train", "tune", "timing", "race", "trial"]
"""train: training run; tune: training run that tunes a method; timing: interleaved steps. In a
round of a search, race: timing that ends early; trial: training run."""

FailureOutcome = Literal["timeout", "crash", "memory", "diverged"]
"""Outcome of a failure. diverged: loss or perplexity is not finite."""


class Result(Document):
    """Header of a result: what ran, where, and by which code."""

    schema_version: int = Field(SCHEMA_VERSION, ge=SCHEMA_VERSION, le=SCHEMA_VERSION)
    kind: Kind
    timing: str = ""
    """Name of the timing; `round-K` of a search; empty for a training run of the matrix."""
    run: str
    """Name of the strategy."""
    seed: int = 0
    """Seed of the weights, the order of the data and random codecs."""
    strategy: dict[str, Any] | None
    """Canonical form; None: steps without communication."""
    strategy_hash: str | None
    world_size: int
    model: str
    parameters: int | None
    """Number of parameters; None where the run failed before the model was built."""
    sequence_length: int
    batch_size: int
    """Sequences of a rank in one micro-batch."""
    accumulation: int
    link: str
    """Connection of the ranks: loopback, or an emulated rate and delay."""
    link_emulation: LinkEmulation | None
    """Emulation of the link; None where the run failed before the link was built."""
    bits_per_second: int | None
    """Rate of the emulated link of the slowest node."""
    delay_ms: float
    ranks_per_node: int
    """Number of ranks that share an emulated link."""
    revision: str
    """Git revision of the code."""
    torch: str
    host: dict[str, Any]
    kernels: str
    """Implementation of codecs and updates: a compiled library with the hash of its sources, or the
    PyTorch reference with the reason."""

    @property
    def source(self) -> str:
        """Name of the measurement: `run NAME`, `method NAME`, `timing NAME` or `round K`."""
        if self.kind in ("train", "tune"):
            return f"{'run' if self.kind == 'train' else 'method'} {self.run}"
        return f"timing {self.timing}" if self.kind == "timing" else self.timing.replace("-", " ")

    @property
    def tokens_of_rank(self) -> int:
        """Tokens of a step that a rank predicts."""
        return self.batch_size * self.accumulation * self.sequence_length

    def header(self) -> dict[str, Any]:
        """Return the fields of the header by name."""
        return {name: getattr(self, name) for name in Result.model_fields}


R = TypeVar("R", bound=Result)


class Failure(Result):
    """Measurement that ended without figures; the header says which measurement."""

    outcome: FailureOutcome
    detail: str
    """Text of the error; one line in a file of results."""
    params_hash: str = ""
    """Hash of the parameters of a training run."""


def only(results: Iterable[Result], body: type[R]) -> list[R]:
    """Return the results of one class, in their order."""
    return [result for result in results if isinstance(result, body)]


class UnitSize(Document):
    """Number of elements that a strategy gathers or reduces in one collective."""

    name: str
    elements: int


class Breakdown(Document):
    """Breakdown of the profiled steps, means over steps and ranks."""

    profiled_step_ms: float
    compute_ms: float
    comm_ms_per_step: float
    comm_share: float
    comm_ms_by_op: dict[str, float]
    comm_ms_by_unit: dict[str, float]
    """Communication by the unit whose values moved; `other`: values of no unit."""
    comm_skew_ms: Finite
    """Wait until the last rank has started the same collective; None where collectives of the ranks
    do not match, as when ranks train without communication."""
    comm_transfer_ms: Finite
    """Communication after the last rank has started, of collectives that match across ranks."""
    exposed_comm_ms: float
    overlap: float
    """Fraction of communication that is overlapped with compute."""
    copy_ms: float
    """Copies to, from and on devices; on the CPU copies count as compute, and this is 0."""
    exposed_copy_ms: float
    """Copies that are overlapped neither with compute nor with communication."""
    idle_ms: float
    """Rest of the step: compute + exposed communication + exposed copies + idle = step."""
    forward_ms: float
    forward_compute_ms: float
    forward_comm_ms: float
    backward_ms: float
    backward_compute_ms: float
    backward_comm_ms: float
    backward_comm_share: float
    update_ms: float
    """Step without forward and backward."""
    update_compute_ms: float
    update_comm_ms: float
