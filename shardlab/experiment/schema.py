"""Schema of `params.yaml`."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, StringConstraints, TypeAdapter, WithJsonSchema, model_validator

from shardlab.core.document import AS_TUPLE, Document
from shardlab.core.errors import UserError
from shardlab.experiment.affinity import CpuAffinity
from shardlab.experiment.hardware import Hardware
from shardlab.experiment.link import Link
from shardlab.strategy.codec_options import Int8Spec
from shardlab.strategy.compression import Compression, WeightCodec
from shardlab.strategy.strategy import Strategy

Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]*$", max_length=40)]
"""Name that becomes part of file names: lower-case letters, digits and hyphens."""
Round = Annotated[str, StringConstraints(pattern=r"^[1-9][0-9]*$")]
Seed = Annotated[int, Field(ge=0, lt=2**31)]
Positive = Annotated[float, Field(gt=0)]
# bounds beyond which a number is a mistake that would cost hours or all memory before it shows
WorldSize = Annotated[int, Field(ge=1, le=65_536)]
"""more ranks than the largest clusters have GPUs are no run"""
Count = Annotated[int, Field(ge=1, le=10**9)]
"""a billion steps, repetitions or trials take years"""
Seconds = Annotated[float, Field(gt=0, le=10**7)]
"""waiting times: four months; clocks of libraries overflow far above"""


_OPTIONS = {
    "split": ("huggingface",),
    "text_column": ("json", "jsonl", "huggingface"),
    "title_column": ("json", "jsonl", "huggingface"),
    "separator": ("text",),
    "streaming": ("huggingface",),
}
"""sources that an option of `Data` is for"""


class Data(Document):
    """Source of the text."""

    source: Literal[
        "wikipedia", "text", "json", "jsonl", "huggingface", "mediawiki", "synthetic"
    ] = "wikipedia"
    """wikipedia: the default corpus, fetched by pip; synthetic: generated text, for quick
    experiments"""
    path: str | None = None
    """file to read (text, json and jsonl: plain, .gz, .bz2 or .zst; mediawiki: .xml or .xml.bz2);
    text: or a folder of .txt and .md files; huggingface: file, folder, or name on the hub"""
    split: str | None = Field(None, pattern=r"^[\w.-]+$")
    """huggingface: split to read; null: train. Its documents are split again by
    `validation_share`"""
    text_column: str = Field("text", min_length=1)
    """json, jsonl, huggingface: column, or key of each record, with the text"""
    title_column: str | None = Field(None, min_length=1)
    """json, jsonl, huggingface: column of titles, which every record must have; null: `title`,
    in the records that have one"""
    separator: str | None = Field(None, min_length=1, max_length=1000)
    """text: what is between two documents of a file, such as "\\n\\n" for paragraphs; null:
    <|endoftext|>. A file without it is one document"""
    streaming: bool = True
    """huggingface, from the hub: fetch rows as they are read; false: fetch all files first, and
    keep them for other runs"""
    documents: int | None = Field(None, ge=1)
    """number of documents to keep"""
    bad_records: Literal["refuse", "skip"] = "refuse"
    """policy for a record that cannot be read or has no text: an error, or counted and skipped"""
    validation_share: float = Field(0.02, gt=0, lt=1)
    """fraction of the documents in the validation split, chosen by a hash of the title, or of the
    id of a document without one"""

    @model_validator(mode="after")
    def _path_fits_source(self) -> Self:
        generated = self.source in ("wikipedia", "synthetic")
        if generated and self.path is not None:
            raise ValueError(f"source {self.source!r} needs no path: remove it")
        if not generated and self.path is None:
            raise ValueError(f"source {self.source!r} needs a path")
        return self

    @model_validator(mode="after")
    def _options_fit_source(self) -> Self:
        for key, sources in _OPTIONS.items():
            given = getattr(self, key) != type(self).model_fields[key].default
            if given and self.source not in sources:
                raise ValueError(f"{key} is for source {' or '.join(sources)}: remove it")
        return self


_VOCABULARY = 2048


class Tokenize(Document):
    """Tokenizer and token shards."""

    tokenizer: str | None = Field(None, min_length=1)
    """train: a byte-level BPE trained on the training split; gpt2: GPT-2's own; or a path to a
    tokenizer.json or a folder that holds one, or a name on the Hugging Face hub. null: that of
    `model.pretrained`; for other models train"""
    vocabulary: int | None = Field(None, ge=257, le=2**31)
    """vocabulary size of a trained tokenizer, 2048 if null; null with a given tokenizer"""
    shards: int = Field(2, ge=1, le=64)
    """files of the training split, built in parallel"""

    @model_validator(mode="after")
    def _vocabulary_is_for_training(self) -> Self:
        if self.tokenizer not in (None, "train") and self.vocabulary is not None:
            raise ValueError(
                "vocabulary is the size of a trained tokenizer: give it with tokenizer: train, "
                "and null otherwise"
            )
        return self

    def for_model(self, model: "Model") -> Self:
        """Return the options with the tokenizer and the vocabulary size that null stands for.

        Raises:
            UserError: a vocabulary size for the tokenizer of a pretrained model.
        """
        tokenizer = self.tokenizer or model.pretrained or "train"
        if tokenizer == "train":
            size = self.vocabulary or _VOCABULARY
            return self.model_copy(update={"tokenizer": tokenizer, "vocabulary": size})
        if self.vocabulary is not None:
            raise UserError(
                "tokenize.vocabulary: model.pretrained brings its own tokenizer: remove it, or set "
                "tokenize.tokenizer to train"
            )
        return self.model_copy(update={"tokenizer": tokenizer})


class Model(Document):
    """Model to train: a preset, or any causal language model of Hugging Face; without dropout."""

    preset: Literal["tiny", "small", "10m", "18m", "62m", "90m", "300m"] | None = None
    """a GPT-2 with random weights"""
    pretrained: str | None = None
    """folder or name on the Hugging Face hub with config.json and safetensors files"""
    config: str | None = None
    """folder, config.json or name on the Hugging Face hub: its architecture with random weights"""

    @property
    def name(self) -> str:
        """Name of the model in records."""
        return self.preset or self.pretrained or self.config or ""

    @model_validator(mode="after")
    def _one_of_three(self) -> Self:
        given = (self.preset, self.pretrained, self.config)
        if sum(value is not None for value in given) != 1:
            raise ValueError("give one of preset, pretrained and config")
        return self


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


class Train(Document):
    """Training run of every strategy."""

    world_size: WorldSize = 2
    threads: int = Field(1, ge=1, le=4096)
    """CPU threads per rank; part of the result, because sums depend on it"""
    placement: CpuAffinity = "auto"
    """CPU affinity of the ranks and NUMA node of their memory. auto: with several NUMA nodes each
    rank gets CPUs of its own on the node of its GPU, or on the nodes round-robin; otherwise nothing
    changes. cores: CPUs of its own on every machine. none: nothing changes. Or the CPUs of each
    rank of a machine, such as ['0-3,8', '4-7']"""
    steps: int = Field(120, ge=2, le=10**9)
    batch_size: int = Field(8, ge=1, le=2**20)
    """sequences per rank and micro-batch"""
    accumulation: int = Field(1, ge=1, le=2**20)
    """micro-batches per step"""
    sequence_length: int = Field(64, ge=2, le=2**24)
    learning_rate: float = Field(3e-3, gt=0)
    warmup_steps: int = Field(10, ge=0)
    """steps of linear learning-rate warm-up"""
    decay: Literal["cosine", "constant"] = "cosine"
    """learning rate after warm-up: cosine decay to a tenth, or constant"""
    weight_decay: float = Field(0.1, ge=0)
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
        kept = {*names} | _WITHOUT_RESULTS
        return Train(**{name: getattr(self, name) for name in kept})

    def given(self) -> dict[str, Any]:
        """Return the parameters that `only` kept and results depend on, as plain data."""
        return self.model_dump(mode="json", exclude=_WITHOUT_RESULTS, exclude_unset=True)

    def meaning(self) -> dict[str, Any]:
        """Return the parameters that the results depend on, as plain data; `deterministic` is left
        out where it is off, as in runs from before it."""
        off = set() if self.deterministic else {"deterministic"}
        return self.model_dump(mode="json", exclude=_WITHOUT_RESULTS | off)


MATRIX, ALL = "matrix", "all"
"""stand for names of strategies; `shardlab.experiment.parameters` puts these in their place"""
_OR_WORD = WithJsonSchema(
    {
        "anyOf": [
            {"enum": [MATRIX, ALL]},
            {"type": "array", "items": TypeAdapter(Name).json_schema(), "minItems": 1},
        ],
    }
)


class Timing(Document):
    """Interleaved steps of several strategies in the same processes, to be compared in pairs."""

    renamed: ClassVar[dict[str, str]] = {"rounds": "repetitions"}

    runs: Annotated[tuple[Name, ...], AS_TUPLE, _OR_WORD] = Field(
        (), min_length=1, json_schema_extra={"default": MATRIX}
    )
    """names of strategies; matrix, the default: those of `strategies`; all: those of
    `timed_strategies`, too"""
    world_size: WorldSize = 2
    link: Link | None = None
    """emulated link between ranks of this machine; null: none"""
    repetitions: Count = 10
    """timed steps of every strategy"""


class Space(Document):
    """Codecs that the search may propose, besides those of the strategies: their costs are
    calibrated."""

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


class Forecast(Document):
    """Measurements that the performance model is fitted on, and strategies that it predicts."""

    timings: Annotated[tuple[Name, ...], AS_TUPLE] = Field(min_length=1)
    """timings that the model is fitted on; it is validated on all others"""
    runs: Annotated[tuple[Name, ...], AS_TUPLE] = Field(min_length=1)
    """runs of these timings to fit on; it is validated on their other runs"""
    ranks: Annotated[tuple[Annotated[int, Field(ge=2, le=2**24)], ...], AS_TUPLE] = Field(
        min_length=1
    )
    """numbers of ranks to extrapolate to"""
    links: Annotated[tuple[Name, ...], AS_TUPLE] = Field(min_length=1)
    """presets of `shardlab.forecast.presets` to extrapolate to"""
    space: Space = Space()
    """codecs to calibrate besides those of the timings, for strategies that were never timed"""


class Quality(Document):
    """Points at which training curves are compared, apart from the end of the run."""

    train_loss: Annotated[tuple[Positive, ...], AS_TUPLE] = ()
    """smoothed training losses, nats per token: steps and seconds to reach each are reported"""
    time_s: Annotated[tuple[Positive, ...], AS_TUPLE] = ()
    """seconds of training: the loss after each is reported"""


class Search(Document):
    """What one of several searches has of its own; null: as in `agent`."""

    link: Link | None = None
    """emulated link of its races and predictions"""
    world_size: WorldSize | None = None
    """ranks of its races and predictions"""
    memory_limit_gb: float | None = Field(None, gt=0)
    """maximum peak memory of one rank"""


class Agent(Document):
    """Search for a better strategy."""

    start: Name = "fsdp2"
    """run whose strategy the first round tries to improve"""
    link: Link | None = None
    """emulated link between the ranks of races and predictions; null: that of `train`"""
    world_size: WorldSize | None = None
    """ranks of races and predictions; null: those of `train`, which gives quality in any case"""
    judge: Literal["rules", "http", "local", "replay"] = "rules"
    """rules: the lowest upper end of a prediction; http: a language model behind an
    OpenAI-compatible endpoint; local: one on this machine; replay: answers that were kept"""
    endpoint: str | None = None
    """http: base URL ending in /v1; the key comes from SHARDLAB_API_KEY"""
    model: str | None = Field(None, pattern=r"^[^\x00-\x1f\x7f]+$")
    """http: name of the language model at the endpoint; local: a Hugging Face folder with
    safetensors files, or a GGUF file; replay: a conversation.json, or a folder of copies of them"""
    candidates: Literal["action", "config"] = "config"
    """action: strategies that differ from the incumbent in their sharding, in their gradient codec
    or in their weight codec; config: all of them"""
    max_candidates: int = Field(6, ge=2, le=16)
    quality_tolerance: float = Field(0.03, ge=0)
    """largest accepted relative rise of validation perplexity"""
    memory_limit_gb: float | None = Field(None, gt=0)
    """maximum peak memory of one rank; null: its GPU's, or its part of the host's"""
    hardware: Hardware = Hardware()
    """what is given in place of what calibrate detected: for the memory limit and the judge"""
    trial_timeout_s: Seconds = 300
    """maximum duration of a race, and of the training runs of one strategy"""
    repetitions: Count = 120
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
        if self.judge in ("local", "replay") and not self.model:
            raise ValueError(f"judge: {self.judge} needs model")
        return self

    def of(self, plan: "RoundPlan") -> "Agent":
        """Return the settings for a round: with what its search has of its own, and no searches."""
        search = self.searches[plan.search] if plan.search else Search()
        own = {name: getattr(search, name) for name in Search.model_fields}
        given = {name: own[name] for name in own if own[name] is not None}
        return self.model_copy(update={**given, "searches": {}})

    def on(self, hardware: Hardware, world_size: int) -> "Agent":
        """Return the settings for ranks on some hardware, whose memory is the limit by default."""
        if self.memory_limit_gb is not None:
            return self
        limit = hardware.memory_of_rank_gb(world_size)
        return self.model_copy(update={"memory_limit_gb": limit})


class Policies(Document):
    """Ways to search, replayed on timings of many strategies: the judge beside controls and others'
    samplers."""

    timings: Annotated[tuple[Name, ...], AS_TUPLE] = ()
    """tables that every policy chooses from; none: no policy is replayed"""
    seeds: Count = 5
    """replays of every policy on every timing"""
    budget: Count = 8
    """strategies that a policy measures besides `agent.start`"""


class RoundPlan(Document):
    """One round of the search."""

    after: str
    """input of the round: results/results.jsonl, or the history of the previous round"""
    search: Name | None = None
    """one of `agent.searches`; null: as `agent` says. A search ends where another one begins"""


class Params(Document):
    """Top level of `params.yaml`."""

    renamed: ClassVar[dict[str, str]] = {
        "runs": "strategies, all of which are runs, and timed_strategies for the others",
        "last_round": "rounds alone, the last of which is the last round",
    }

    codecs: Annotated[tuple[str, ...], AS_TUPLE] = ()
    """modules in the folder user_codecs (`user_codecs.ternary`), or of installed packages, that
    register codecs for the strategies below"""
    inputs: dict[Name, str]
    """files and folders outside of the experiment, by name: a change of what they hold repeats the
    stages that read them"""
    data: Data
    tokenize: Tokenize
    model: Model
    train: Train
    strategies: dict[Name, Strategy] = Field(min_length=1)
    """the matrix: strategies by name, each of which is trained with every seed"""
    timed_strategies: dict[Name, Strategy] = {}
    """strategies for timings alone, by other names"""
    seeds: list[Seed] = Field(min_length=1)
    baseline: Name
    """run that the others are compared with"""
    timings: dict[Name, Timing] = Field(min_length=1)
    """by name: interleaved timings, on the link and ranks of the matrix and on others"""
    comparison: Name
    """timing whose step times the report compares: of all runs of the matrix, with the ranks and
    the link of `train`. The training runs themselves are minutes apart, in which a machine drifts
    by more than strategies differ"""
    forecast: Forecast
    quality: Quality
    agent: Agent
    policies: Policies
    rounds: dict[Round, RoundPlan] = Field(min_length=1)
