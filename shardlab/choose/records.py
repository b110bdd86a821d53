"""Records of the search: the proposal, the trial and the decision of a round."""

from collections.abc import Sequence
from typing import Annotated, Literal, Self

from shardlab.core.document import AS_TUPLE, Document
from shardlab.core.types import Seed
from shardlab.models.settings import Model
from shardlab.results.files import AnyResult
from shardlab.results.result import FailureOutcome
from shardlab.results.table import SearchWorkload, StepRatio
from shardlab.results.timing_result import Race
from shardlab.results.train_result import TrainResult
from shardlab.strategy.document import CanonicalStrategy
from shardlab.train.settings import Train

Role = Literal["incumbent", "start", "judge", "forecast", "random"]
"""why a strategy is raced: held so far; the reference; chosen by the judge; the lowest prediction;
drawn from all feasible strategies. The last two measure the judge as it works"""


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


class Action(Document):
    """Named change of one setting of the incumbent."""

    name: str
    hypothesis: str
    """why it might be faster, or fit"""
    fact: str
    """measurement that speaks for it"""
    change: str
    """setting with its value before and after"""


class Candidate(Document):
    """Strategy that a judge may choose or that a race times."""

    hash: str
    strategy: CanonicalStrategy
    label: str
    why: str
    """origin"""
    action: Action | None = None
    """that makes it of the incumbent; None: it is any strategy"""
    prediction: Prediction
    roles: list[Role] = []
    """in the race"""
    trained: bool = False
    """whether it has records, so that no round trains it again"""

    @property
    def id(self) -> str:
        """First digits of the hash, independent of its place in a list."""
        return self.hash[:8]


class Narrowing(Document):
    """Numbers of strategies by which the space of the search was narrowed down."""

    strategies: int
    """legal ones, or actions for which a fact speaks"""
    beyond_memory: int
    spared: int
    """that save memory which is not needed, and take longer"""
    known: int
    """measured before, or worse in perplexity than is tolerated"""
    unpredicted: dict[str, int]
    """by reason"""
    predicted: int
    too_short: str = ""
    """synchronisations of parameters that are not proposed, and why"""


class Verdict(Document):
    """Answer of a judge."""

    choice: str | None
    """id of a candidate, or null for an abstention"""
    reason: str
    judge: str
    prompts: list[str] = []
    """to a language model: files with the prompts and their answers"""


class TrialSettings(Document):
    """Parameters of the training runs of a round, beside the strategies of its arms."""

    train: Train
    """what no result depends on is at its default"""
    model: Model
    seeds: Annotated[tuple[Seed, ...], AS_TUPLE]

    @classmethod
    def of(cls, train: Train, model: Model, seeds: Sequence[int]) -> Self:
        """Return those of the parameters of an experiment."""
        return cls(train=Train(**train.meaning()), model=model, seeds=(*seeds,))


class Proposal(Document):
    """Shortlist of one round, the choice among it, and what the race times."""

    round: int
    settings: TrialSettings
    """with which arms are trained"""
    workload: SearchWorkload
    incumbent: str
    """hash"""
    evidence: str
    memory_limit_bytes: int
    fits: bool = True
    """whether the incumbent's peak is within the limit; otherwise a slower arm may replace it"""
    peaks: dict[str, int] = {}
    """of a rank, by hash of all that was measured; bytes, predicted where no training gave them"""
    space: Narrowing | None
    """None where the search had to stop"""
    candidates: list[Candidate]
    verdict: Verdict
    arms: list[Candidate]
    """of the race, the incumbent first; empty where nothing was chosen"""
    reference: list[TrainResult]
    """of the start, with which those of an arm are compared"""
    repetitions: int
    """of the race at most"""
    race_limit_s: float = 300.0
    """maximum duration of the race"""
    training_limit_s: float = 300.0
    """maximum duration of the training runs of an arm"""


class Trial(Document):
    """Race of a round, and the training runs of what was faster and may be worse."""

    round: int
    race: Race | None = None
    """its runs are named by the hashes of their strategies; None in a round without a choice"""
    results: list[AnyResult] = []
    """of the training runs"""
    seconds: float = 0.0
    """of the race and of training"""


class Comparison(Document):
    """Strategy of a race compared with the incumbent, the limits and the start."""

    hash: str
    label: str
    roles: list[Role]
    outcome: Literal["ok"] | FailureOutcome
    step: StepRatio | None
    """over the incumbent; None where the race gave no figures"""
    predicted_ms: float | None = None
    """step that the forecast expected"""
    perplexity_ratio: float | None = None
    """over the start's; None: unknown"""
    objections: list[str] = []
    """to holding it; it is admissible and faster where there is none"""


class Decision(Document):
    """One round, from the candidates to the strategy that is held after it, and why."""

    round: int
    search: str
    """name of the search; empty for the one without a name"""
    link: str
    world_size: int
    verdict: Verdict
    space: Narrowing | None
    candidates: list[Candidate]
    stopped: str
    """why the race ended"""
    seconds: float
    decision: Literal["accept", "reject", "none"]
    reason: str
    held: str
    """hash"""
    fits: bool = True
    """whether its peak is within the memory limit, as far as it is known"""
    compared: list[Comparison] = []
    warnings: list[str] = []
    """on CPU time that others used during the race"""
