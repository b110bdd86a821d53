"""Documents of one round of the search: candidates, verdict, arms, trial, decision."""

from typing import ClassVar, Literal

from shardlab.config.contention import Contention
from shardlab.config.race_record import Race
from shardlab.config.run_record import Record
from shardlab.config.strategy import CanonicalStrategy
from shardlab.core.document import Document

Outcome = Literal["ok", "timeout", "crash", "memory", "diverged"]
"""of measuring a strategy; diverged: no finite loss or perplexity"""
Role = Literal["incumbent", "start", "judge", "forecast", "random"]
"""why a strategy is timed: held so far; the reference; what the judge chose; the lowest prediction;
drawn from all feasible strategies. The last two measure the judge as it works"""

Fault = Literal["order", "answer"]
"""of a judge: its choice depended on the order of the candidates; it gave none that can be used"""


class Prediction(Document):
    """Prediction of a strategy by the performance model, the memory formula and earlier runs."""

    step_ms: float | None
    """None where the model cannot predict it"""
    low_ms: float | None
    high_ms: float | None
    """95 % prediction interval"""
    memory_bytes: int
    """peak of a rank"""
    perplexity_ratio: float | None
    """over the start's, in runs with the same codecs; None: unknown"""
    note: str = ""
    """source of the perplexity, or why there is no prediction"""


class Candidate(Document):
    """A strategy that the judge may choose."""

    renamed: ClassVar[dict[str, str]] = {"brief": "label"}

    id: str
    """first digits of the strategy's hash, independent of its place in the list"""
    strategy: CanonicalStrategy
    label: str
    why: str
    """origin"""
    prediction: Prediction


class Space(Document):
    """Numbers of strategies by which the space of the search was narrowed down."""

    strategies: int
    """legal ones"""
    beyond_memory: int
    spared: int
    """that save memory which is not needed, and take longer"""
    known: int
    """measured before, or worse in perplexity than is tolerated"""
    unpredicted: dict[str, int]
    """by reason"""
    predicted: int


class Verdict(Document):
    """Answer of a judge."""

    choice: str | None
    """id of a candidate, or null for an abstention"""
    reason: str
    judge: str
    prompts: int = 0
    """sent to a language model, probes included; they are in conversation.json of the round"""
    fault: Fault | None = None
    """of an abstention that the judge did not mean"""


class Measurement(Document):
    """Figures of one training run that the search uses; fields as in `shardlab.config.run_record`.

    Bytes are those of the record's ledger by kind of message.
    """

    seed: int
    step_ms_p50: float
    tokens_per_s: float
    flops_share: float
    gradients_bytes_raw: float
    gradients_bytes_wire: float
    weights_bytes_raw: float
    weights_bytes_wire: float
    encode_ms: float
    decode_ms: float
    profiled_step_ms: float
    compute_ms: float
    comm_ms_per_step: float
    exposed_comm_ms: float
    idle_ms: float
    memory_peak_bytes: int
    val_ppl: float
    contention: Contention | None

    @classmethod
    def of(cls, record: Record) -> "Measurement":
        """Extract the part of a record that the search keeps."""
        ledger = {
            f"{kind}_{what}": record.ledger[kind][what]
            for kind in ("gradients", "weights")
            for what in ("bytes_raw", "bytes_wire")
        }
        rest = {name: getattr(record, name) for name in cls.model_fields if name not in ledger}
        return cls(**rest, **ledger)


class StepRatio(Document):
    """Step time over that of another strategy, in pairs of interleaved steps."""

    source: str
    """`timing NAME` or `round K`"""
    ratio: float
    low: float
    high: float
    repetitions: int


class Arm(Document):
    """A strategy that a race times, and why."""

    roles: list[Role]
    hash: str
    label: str
    strategy: CanonicalStrategy
    trained: bool
    """whether its quality is known, so that it need not be trained if it is faster"""


class Proposal(Document):
    """Shortlist of one round, the choice among it, and what the race times."""

    round: int
    incumbent: str
    """hash"""
    evidence: str
    memory_limit_bytes: int
    fits: bool = True
    """whether the incumbent's peak is within the limit; otherwise a slower arm may replace it"""
    peaks: dict[str, int] = {}
    """predicted of what was timed and has none measured, by hash; bytes of a rank"""
    space: Space | None
    """None where the search had to stop"""
    candidates: list[Candidate]
    verdict: Verdict
    arms: list[Arm]
    """the incumbent first; empty where nothing was chosen"""
    reference: list[Measurement]
    """training runs of the start, with which those of an arm are compared"""


class Trained(Document):
    """Training runs of a strategy, for its quality."""

    hash: str
    outcome: Outcome
    detail: str = ""
    """text of the error"""
    measurements: list[Measurement] = []
    """by seed, up to the one that left no hope; empty unless the outcome is ok"""


class Trial(Document):
    """Race of a round, and the training runs of what was faster and may be worse."""

    round: int
    race: Race | None = None
    """its runs are named by the hashes of their strategies; None in a round without a choice"""
    trained: list[Trained] = []
    seconds: float = 0.0
    """of the race and of training"""


class Comparison(Document):
    """An arm of a race compared with the incumbent, the limits and the start."""

    hash: str
    label: str
    roles: list[Role]
    outcome: Outcome
    step: StepRatio | None
    """over the incumbent; None where the race gave no figures"""
    predicted_ms: float | None = None
    """step that the forecast expected, where it was a candidate"""
    perplexity_ratio: float | None = None
    """over the start's; None: unknown"""
    memory_peak_bytes: int | None = None
    """of the worst seed, where it was trained"""
    objections: list[str] = []
    """what speaks against it; it is admissible and faster where nothing does"""


class Decision(Document):
    """Strategy that is held after a round, and why."""

    decision: Literal["accept", "reject", "none"]
    reason: str
    held: str
    """hash"""
    fits: bool = True
    """whether its peak is within the memory limit, as far as it is known"""
    compared: list[Comparison] = []
    warnings: list[str] = []
    """what others disturbed, used all the same"""


class Round(Decision):
    """One round, from the candidates to the decision."""

    round: int
    search: str = ""
    """name of the search, if it has one"""
    verdict: Verdict
    space: Space | None
    candidates: list[Candidate]
    stopped: str
    """why the race ended"""
    seconds: float
