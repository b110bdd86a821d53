"""Parameters of an experiment: sections, the defaults that are names, and cross-references."""

from collections.abc import Collection
from typing import Annotated, Any, TypeVar

from pydantic import ConfigDict, Field

from shardlab.config.machine import LOOPBACK
from shardlab.config.model_and_data import Data, Model, Tokenize
from shardlab.config.schema import (
    Agent,
    Forecast,
    Name,
    Quality,
    Repetitions,
    Round,
    RoundPlan,
    Seed,
    Timing,
    Train,
    each_timing,
)
from shardlab.config.strategy import Strategy
from shardlab.config.sync import Sync
from shardlab.config.validation import check_fits
from shardlab.core.document import AS_TUPLE, Document
from shardlab.core.errors import UserError, nearest

Modules = Annotated[tuple[str, ...], AS_TUPLE]
_T = TypeVar("_T", bound=Repetitions)
REQUIRED = ("strategies", "seeds", "baseline", "timings", "rounds")
"""sections of an experiment; DVC interpolates all of them, so that none can have a default"""


class Params(Document):
    """Top level of `params.yaml`. Only what DVC interpolates has to be there: strategies, seeds,
    timings, rounds, baseline, and inputs. A file may also hold a part of the parameters, for single
    stages: what is there must be right."""

    model_config = ConfigDict(json_schema_extra={"required": [*REQUIRED]})

    codecs: Modules = ()
    """modules in the folder user_codecs (`user_codecs.ternary`), or of installed packages, that
    register codecs for the strategies below"""
    inputs: dict[Name, str] = {}
    """files and folders outside of the experiment, by name: a change of what they hold repeats the
    stages that read them"""
    data: Data = Data()
    tokenize: Tokenize = Tokenize()
    model: Model = Model(preset="tiny")
    train: Train = Train()
    strategies: dict[Name, Strategy] = Field({}, min_length=1)
    """the matrix: strategies by name, each of which is trained with every seed"""
    timed_strategies: dict[Name, Strategy] = {}
    """strategies for timings alone, by other names"""
    seeds: list[Seed] = Field([], min_length=1)
    baseline: Name = ""
    """run that the others are compared with"""
    timings: dict[Name, Timing] = Field({}, min_length=1)
    """by name: interleaved timings, on the link and ranks of the matrix and on others"""
    comparison: Name = ""
    """timing whose step times the report compares, of all runs of the matrix, with the ranks and
    the link of `train`; by default the first by name that is so. The training runs themselves are
    minutes apart, in which a machine drifts by more than strategies differ"""
    forecast: Forecast = Forecast()
    quality: Quality = Quality()
    agent: Agent = Agent()
    rounds: dict[Round, RoundPlan] = Field({}, min_length=1)

    def all_strategies(self) -> dict[str, Strategy]:
        """Return the strategies of the matrix and those for timings alone."""
        return {**self.strategies, **self.timed_strategies}

    def with_names(self) -> "Params":
        """Return the parameters with names in place of what stands for them.

        Words for the runs of a timing become names of strategies. The baseline is where the search
        starts and what the forecast is fitted on; a timing of all runs of the matrix, on the ranks
        and link of `train`, is the one that is compared, by name the first of several.
        """
        if not (self.strategies and self.timings):
            return self
        # sorted: the order in the file changes no timing
        runs = sorted(self.strategies)
        words = {"matrix": runs, "all": sorted(self.all_strategies())}

        def named(timing: _T) -> _T:
            names = words[timing.runs] if isinstance(timing.runs, str) else timing.runs
            return timing.model_copy(update={"runs": tuple(names)})

        timings = {}
        for name, timing in self.timings.items():
            others = {other: named(part) for other, part in timing.interleaved.items()}
            timings[name] = named(timing).model_copy(update={"interleaved": others})
        found: dict[str, Any] = {"timings": timings}
        if self.baseline:
            comparison = self.comparison or min(self._comparable(timings), default="")
            first = comparison or min(timings)
            timed, fitted = (
                self.forecast.timings or (first,),
                self.forecast.runs or (self.baseline,),
            )
            found["comparison"] = comparison
            found["forecast"] = self.forecast.model_copy(update={"timings": timed, "runs": fitted})
            if "start" not in self.agent.model_fields_set:
                found["agent"] = self.agent.model_copy(update={"start": self.baseline})
        return self.model_copy(update=found)

    def _comparable(self, timings: dict[str, Timing]) -> list[str]:
        train = self.train
        return [
            name
            for name, timing in each_timing(timings).items()
            if {*self.strategies} <= {*timing.runs}
            and (timing.world_size, timing.link) == (train.world_size, train.link)
        ]

    def check_references(self) -> None:
        """Check references from one section to another, where both are present.

        Raises:
            UserError: the key, what is wrong and the fix.
        """
        if self.strategies:
            self._check_strategies()
        self._check_timings()
        self._check_links()
        self.tokenize.for_model(self.model)
        if len(set(self.seeds)) < len(self.seeds):
            raise UserError("seeds: a seed is named twice")
        self._check_rounds()

    def _check_strategies(self) -> None:
        if self.baseline:
            _check_name("baseline", self.baseline, self.strategies, "run")
        if "start" in self.agent.model_fields_set:
            _check_name("agent.start", self.agent.start, self.strategies, "run")
        for name in self.timed_strategies:
            if name in self.strategies:
                raise UserError(f"timed_strategies.{name}: {name!r} is one of strategies, too")
        for i, name in enumerate(self.forecast.runs):
            _check_name(f"forecast.runs.{i}", name, self.all_strategies(), "strategy")
        for name, strategy in self.strategies.items():
            self._check_fits(f"strategies.{name}", strategy, self.train.world_size)

    def _check_timings(self) -> None:
        keys: dict[str, str] = {}
        for name, whole in self.timings.items():
            for part, timing in whole.parts(name).items():
                key = f"timings.{name}" + ("" if part == name else f".interleaved.{part}")
                if part in keys:
                    raise UserError(f"{key}: {keys[part]} has the same name: choose another")
                keys[part] = key
                if self.strategies:
                    self._check_timing(key, timing)
        if keys and self.comparison:
            _check_name("comparison", self.comparison, keys, "timing")
        for i, name in enumerate(self.forecast.timings if keys else ()):
            _check_name(f"forecast.timings.{i}", name, keys, "timing")

    def _check_links(self) -> None:
        train, agent = self.train, self.agent
        link, size = agent.link or train.link, agent.world_size or train.world_size
        timings = {f"timings.{name}": each for name, each in each_timing(self.timings).items()}
        places = {key: (timing.link, timing.world_size) for key, timing in timings.items()}
        places |= {"train": (train.link, train.world_size), "agent": (link, size)}
        for name, search in agent.searches.items():
            places[f"agent.searches.{name}"] = search.link or link, search.world_size or size
        for key, (each, ranks) in places.items():
            try:
                if each is not None:
                    each.rates_of_nodes(ranks)
            except UserError as error:
                raise UserError(f"{key}.{error}") from None

    def _check_timing(self, key: str, timing: Repetitions) -> None:
        strategies = self.all_strategies()
        for i, run in enumerate(timing.runs):
            if run in timing.runs[:i]:
                raise UserError(f"{key}.runs.{i}: {run!r} is named twice")
            _check_name(f"{key}.runs.{i}", run, strategies, "strategy")
            self._check_fits(f"{key}.runs.{i}", strategies[run], timing.world_size)

    def _check_fits(self, key: str, strategy: Strategy, world_size: int) -> None:
        try:
            check_fits(strategy, world_size, self.train.batch_size * self.train.accumulation)
        except UserError as error:
            raise UserError(f"{key}: {error}") from None
        if strategy.sync is not None:
            self._check_sync(f"{key}.sync", strategy.sync)

    def _check_sync(self, key: str, sync: Sync) -> None:
        if sync.every + sync.warmup_steps > self.train.steps:
            raise UserError(
                f"{key}: the first exchange is after step {sync.every + sync.warmup_steps} of "
                f"{self.train.steps}: lower every or warmup_steps, or raise train.steps"
            )

    def check_comparison(self) -> None:
        """Check that the comparison has the runs of the matrix, on the ranks and link of `train`.

        Not one of the references that every stage checks: `--set train.link.rate=1gbit` and the
        like for a single run leave the comparison as it is.

        Raises:
            UserError: the key, what is wrong and the fix.
        """
        if self.comparison not in self._comparable(self.timings):
            link = self.train.link.name if self.train.link else LOOPBACK
            what = f"timing {self.comparison!r}" if self.comparison else "a timing"
            raise UserError(
                f"comparison: {what} has to time all runs of the matrix, with the "
                f"{self.train.world_size} ranks and the link ({link}) of train: change timings"
            )

    def _check_rounds(self) -> None:
        before = "results/results.jsonl"
        searches = [plan.search for plan in self.rounds.values()]
        for number, (name, plan) in enumerate(self.rounds.items(), start=1):
            key = f"rounds.{name}"
            if name != str(number):
                raise UserError(f"{key}: expected round '{number}' here: count up from '1'")
            if plan.after != before:
                raise UserError(f"{key}.after: expected {before!r} (found {plan.after!r})")
            if plan.search not in (None, *self.agent.searches):
                raise UserError(
                    f"{key}.search: {plan.search!r} is no search: add it to agent.searches"
                )
            if plan.search in searches[: number - 1] and plan.search != searches[number - 2]:
                raise UserError(f"{key}.search: put the rounds of a search one after another")
            before = f"results/rounds/{name}/history.json"


def _check_name(key: str, name: str, valid: Collection[str], kind: str) -> None:
    if name not in valid:
        raise UserError(f"{key}: {name!r} is no {kind}; {nearest(name, valid)}")
