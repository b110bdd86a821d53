"""Documents of one round of the search: candidates, verdict, proposal, trial, decision."""

from typing import ClassVar, Literal

from shardlab.core.document import Document
from shardlab.records.run import Record
from shardlab.strategy.strategy import CanonicalStrategy, Strategy

Outcome = Literal["ok", "timeout", "crash", "memory", "none"]
"""outcome of a trial; none: nothing was chosen, so nothing ran"""


class Candidate(Document):
    """A strategy that the judge may choose."""

    renamed: ClassVar[dict[str, str]] = {"brief": "label"}

    id: str
    """first digits of the strategy's hash, independent of its place in the list"""
    strategy: CanonicalStrategy
    label: str
    why: str
    """origin"""


class Refused(Document):
    """A strategy that was not offered."""

    renamed: ClassVar[dict[str, str]] = {"brief": "label"}

    label: str
    reason: str


class Verdict(Document):
    """Answer of a judge."""

    choice: str | None
    """id of a candidate, or null for an abstention"""
    reason: str
    judge: str


class Measurement(Document):
    """Figures of one seed that the search uses; fields as in `shardlab.records.run`.

    Bytes are those of the record's ledger by kind of message.
    """

    seed: int
    step_ms_p50: float
    tokens_per_s: float
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


class TrialSummary(Document):
    """A trial as the history keeps it."""

    renamed: ClassVar[dict[str, str]] = {"brief": "label"}

    outcome: Outcome
    detail: str
    """text of the error, for a failed trial"""
    hash: str | None
    label: str | None
    measurements: list[Measurement]


class Comparison(Document):
    """A trial compared with the incumbent and the limits."""

    seeds: int
    """seeds that both were measured with"""
    step_ratio: float
    """step_ms_p50 of the trial over that of the incumbent, geometric mean over these seeds"""
    interval: list[float] | None
    """95 % Student interval of the ratio, low and high; null with fewer than two seeds"""
    perplexity_ratio: float
    """mean val_ppl over that of the strategy that the search started from"""
    memory_peak_bytes: int
    """of the worst seed"""


class Decision(Document):
    """Whether the strategy of the trial replaces the incumbent."""

    decision: Literal["accept", "reject", "none"]
    reason: str
    comparison: Comparison | None = None


class Round(Decision):
    """One round, from the candidates to the decision."""

    round: int
    verdict: Verdict
    candidates: list[Candidate]
    refused: list[Refused]
    trial: TrialSummary


class Proposal(Document):
    """Candidates of one round and the choice among them."""

    round: int
    incumbent_hash: str
    evidence: str
    memory_limit_bytes: int
    candidates: list[Candidate]
    refused: list[Refused]
    verdict: Verdict
    chosen: Strategy | None
    chosen_hash: str | None


class Trial(Document):
    """Outcome of a trial, `none` in a round in which nothing was chosen."""

    outcome: Outcome
    detail: str = ""
    """text of the error, for a failed trial"""
    strategy: CanonicalStrategy | None = None
    hash: str | None = None
    key: str | None = None
    """key in the store"""
    limit_s: float | None = None
    records: list[Record] = []
    """one per seed; empty unless the outcome is ok"""
