"""One result: what was measured of one strategy, or how that failed.

Every measurement leaves results, and reports, predictions, searches and comparisons read nothing
else. A result is a header, which says what ran, on which link and on which machine, and a body:

- `train_result.TrainResult`, kind `train` or `trial`: a training run of one seed;
- `tune_result.TuneResult`, kind `tune`: a training run that tunes a method;
- `timing_result.TimingResult`, kind `timing` or `race`: interleaved steps with other strategies;
- `Failure`, of any kind: the outcome and the error in its place.

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
"""None: not finite, as in a run that diverged; JSON has no such number"""

LinkEmulation = Literal["none", "namespaces", "in-process"]
"""none: the link is real; namespaces: the kernel delays packets; in-process: collectives end when
the formula issue + delay + bytes / rate says"""

Kind = Literal["train", "tune", "timing", "race", "trial"]
"""train: a training run; tune: one of a method that is tuned; timing: interleaved steps. In a round
of a search, race: a timing that ends early; trial: a training run"""

FailureOutcome = Literal["timeout", "crash", "memory", "diverged"]
"""diverged: no finite loss or perplexity"""


class Result(Document):
    """Header of a result: what ran, where, and by which code."""

    schema_version: int = Field(SCHEMA_VERSION, ge=SCHEMA_VERSION, le=SCHEMA_VERSION)
    kind: Kind
    timing: str = ""
    """name of a timing; `round-K` of a search; empty for a training run of the matrix"""
    run: str
    """name of the strategy"""
    seed: int = 0
    """seed of the weights, the order of the data and random codecs"""
    strategy: dict[str, Any] | None
    """canonical form; None: steps without communication"""
    strategy_hash: str | None
    world_size: int
    model: str
    parameters: int | None
    """None where it failed before the model was built"""
    sequence_length: int
    batch_size: int
    """sequences of a rank in one part of a step"""
    accumulation: int
    link: str
    """how the ranks were connected: loopback, or an emulated rate and delay"""
    link_emulation: LinkEmulation | None
    """None where it failed before the link was built"""
    bits_per_second: int | None
    """rate of the emulated link, of the slowest node"""
    delay_ms: float
    ranks_per_node: int
    """ranks that share an emulated link"""
    revision: str
    """git revision of the code"""
    torch: str
    host: dict[str, Any]
    kernels: str
    """what computed codecs and updates: a compiled library with the hash of its sources, or the
    PyTorch reference and why"""

    @property
    def source(self) -> str:
        """The measurement in words: `run NAME`, `method NAME`, `timing NAME` or `round K`."""
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
    """Measurement that ended without figures, of which the header says what it was."""

    outcome: FailureOutcome
    detail: str
    """text of the error; one line in a file of results"""
    params_hash: str = ""
    """parameters of a training run"""


def only(results: Iterable[Result], body: type[R]) -> list[R]:
    """Return the results of one class, in their order."""
    return [result for result in results if isinstance(result, body)]


class UnitSize(Document):
    """Elements that a strategy gathers or reduces in one collective."""

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
    """by the unit whose values moved; `other` for none"""
    comm_skew_ms: Finite
    """time until the last rank has started the same collective; None where collectives of the ranks
    do not match, as of ranks that train alone"""
    comm_transfer_ms: Finite
    """the rest of the communication that could be matched across ranks"""
    exposed_comm_ms: float
    overlap: float
    """fraction of communication that is overlapped with compute"""
    copy_ms: float
    """copies to, from and on devices; on the CPU copies count as compute and this is 0"""
    exposed_copy_ms: float
    """copies not overlapped with compute or communication"""
    idle_ms: float
    """compute + exposed communication + exposed copies + idle = step"""
    forward_ms: float
    forward_compute_ms: float
    forward_comm_ms: float
    backward_ms: float
    backward_compute_ms: float
    backward_comm_ms: float
    backward_comm_share: float
    update_ms: float
    """the rest of the step"""
    update_compute_ms: float
    update_comm_ms: float
