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
"""Reason to race a strategy. incumbent: the best so far; start: the baseline; judge: the choice of
the judge; forecast: the shortest predicted step; random: drawn from all tolerated strategies. The
last two are controls that show what the judge is worth."""


class Prediction(Document):
    """Prediction of a strategy by the performance model, the memory formula and earlier runs."""

    step_ms: float | None
    """Step; None where the model cannot predict it."""
    low_ms: float | None
    high_ms: float | None
    """95 % prediction interval."""
    memory_bytes: int
    """Peak of a rank."""
    perplexity_ratio: float | None
    """Perplexity over the start's, in runs with the same codecs; None: unknown."""
    note: str = ""
    """Source of the perplexity, or why there is no prediction."""


class Action(Document):
    """Named change of one setting of the incumbent."""

    name: str
    hypothesis: str
    """Why the change might be faster, or fit in memory."""
    fact: str
    """Measurement that speaks for the change."""
    change: str
    """Setting with its value before and after."""


class Candidate(Document):
    """Strategy that a judge may choose or that a race times."""

    hash: str
    strategy: CanonicalStrategy
    label: str
    why: str
    """Why it is a candidate."""
    action: Action | None = None
    """Action that changes the incumbent to it; None: there is none."""
    prediction: Prediction
    roles: list[Role] = []
    """Roles in the race."""
    trained: bool = False
    """Whether it has training runs, so that no round trains it again."""

    @property
    def id(self) -> str:
        """First digits of the hash, which do not depend on the position in a list."""
        return self.hash[:8]


class Narrowing(Document):
    """Numbers of strategies by which the space of the search was narrowed down."""

    strategies: int
    """Number of legal strategies, or of actions with a fact that speaks for them."""
    beyond_memory: int
    spared: int
    """Number that save memory without need, and take longer."""
    known: int
    """Number that were measured before, or are worse in perplexity than is tolerated."""
    unpredicted: dict[str, int]
    """Number without a prediction, by reason."""
    predicted: int
    too_short: str = ""
    """Values of `sync` that are not proposed, and why."""


class Verdict(Document):
    """Answer of a judge."""

    choice: str | None
    """Id of a candidate, or null for an abstention."""
    reason: str
    judge: str
    prompts: list[str] = []
    """Files with the prompts to a language model and its answers."""


class TrialSettings(Document):
    """Parameters of the training runs of a round, without the strategies of its arms."""

    train: Train
    """Settings of training; a setting that no result depends on has its default."""
    model: Model
    seeds: Annotated[tuple[Seed, ...], AS_TUPLE]

    @classmethod
    def of(cls, train: Train, model: Model, seeds: Sequence[int]) -> Self:
        """Return the settings by the parameters of an experiment."""
        return cls(train=Train(**train.meaning()), model=model, seeds=(*seeds,))


class Proposal(Document):
    """Shortlist of one round, the choice of the judge, and the strategies that the race times."""

    round: int
    settings: TrialSettings
    """Settings with which arms are trained."""
    workload: SearchWorkload
    incumbent: str
    """Hash of the incumbent."""
    evidence: str
    memory_limit_bytes: int
    fits: bool = True
    """Whether the incumbent's peak is within the limit; otherwise a slower arm may replace it."""
    peaks: dict[str, int] = {}
    """Peak of a rank in bytes, by hash of each measured strategy; predicted where none was
    measured."""
    space: Narrowing | None
    """None where the search had to stop."""
    candidates: list[Candidate]
    verdict: Verdict
    arms: list[Candidate]
    """Strategies of the race, the incumbent first; empty where nothing was chosen."""
    reference: list[TrainResult]
    """Training runs of the start, the baseline of an arm's perplexity."""
    repetitions: int
    """Maximum repetitions of the race."""
    race_limit_s: float = 300.0
    """Maximum duration of the race."""
    training_limit_s: float = 300.0
    """Maximum duration of the training runs of an arm."""


class Trial(Document):
    """Race of a round, and training runs of faster strategies that may be worse in quality."""

    round: int
    race: Race | None = None
    """The race, with runs named by the hashes of their strategies; None in a round without a
    choice."""
    results: list[AnyResult] = []
    """Results of the training runs."""
    seconds: float = 0.0
    """Duration of the race and of training."""


class Comparison(Document):
    """Strategy of a race compared with the incumbent, the limits and the start."""

    hash: str
    label: str
    roles: list[Role]
    outcome: Literal["ok"] | FailureOutcome
    step: StepRatio | None
    """Step over the incumbent's; None where the race gave no figures."""
    predicted_ms: float | None = None
    """Step that the forecast predicted."""
    perplexity_ratio: float | None = None
    """Perplexity over the start's; None: unknown."""
    objections: list[str] = []
    """Objections to it as the next incumbent; empty where it is admissible and faster."""


class Decision(Document):
    """One round, from the candidates to the incumbent after it, and why."""

    round: int
    search: str
    """Name of the search; empty for the search without a name."""
    link: str
    world_size: int
    verdict: Verdict
    space: Narrowing | None
    candidates: list[Candidate]
    stopped: str
    """Why the race ended."""
    seconds: float
    decision: Literal["accept", "reject", "none"]
    reason: str
    held: str
    """Hash of the incumbent after the round."""
    fits: bool = True
    """Whether its peak is within the memory limit, as far as the peak is known."""
    compared: list[Comparison] = []
    warnings: list[str] = []
    """Warnings of CPU time that other processes used during the race."""
