"""Parameters of an experiment: sections, the defaults that are names, and cross-references."""

from collections.abc import Callable, Collection, Iterator
from typing import Annotated, Any, TypeVar

from pydantic import ConfigDict, Field, StringConstraints

from shardlab.choose.settings import Agent, RoundPlan
from shardlab.core.document import AS_TUPLE, Document
from shardlab.core.errors import UserError, nearest
from shardlab.core.link import LOOPBACK
from shardlab.core.types import Name, Seed
from shardlab.data.settings import Data, Tokenize
from shardlab.models.settings import Model
from shardlab.predict.settings import Forecast
from shardlab.report.settings import Quality
from shardlab.results.settings import Repetitions, Timing
from shardlab.results.timing_parts import each_timing, parts
from shardlab.strategy.document import Strategy
from shardlab.strategy.validation import check_fits
from shardlab.train.settings import Train
from shardlab.train.tune_settings import Method, Tune

Round = Annotated[str, StringConstraints(pattern=r"^[1-9][0-9]*$")]
Modules = Annotated[tuple[str, ...], AS_TUPLE]
_T = TypeVar("_T", bound=Repetitions)
REQUIRED = {
    "strategies": "{fsdp2: {engine: fsdp2}}",
    "seeds": "[0]",
    "baseline": "fsdp2",
    "timings": "{two-ranks: {}}",
    "rounds": "{'1': {after: results/results.jsonl}}",
}
"""sections of an experiment, each with an example; DVC interpolates all of them, so that none can
have a default"""


class Params(Document):
    """Top level of `params.yaml`. Only what DVC interpolates has to be there: strategies, seeds,
    timings, rounds, baseline, inputs and methods. A file may also hold a part of the parameters,
    for single stages: what is there must be right."""

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
    """of initial weights and of the order of samples: one run each of every strategy"""
    baseline: Name = ""
    """run that the others are compared with"""
    timings: dict[Name, Timing] = Field({}, min_length=1)
    """by name: interleaved timings, on the link and ranks of the matrix and on others"""
    comparison: Name = ""
    """timing whose step times the report compares, of all runs of the matrix, with the ranks and
    the link of `train`; by default the first by name that is so. The training runs themselves are
    minutes apart, in which a machine drifts by more than strategies differ"""
    tune: Tune | None = None
    """settings that are searched for every method; null: nothing is tuned"""
    methods: dict[Name, Method] = {}
    """ways to train, by name, of which the report says which reaches one loss first"""
    forecast: Forecast = Forecast()
    quality: Quality = Quality()
    agent: Agent = Agent()
    rounds: dict[Round, RoundPlan] = Field({}, min_length=1)
    """rounds of the search, by number"""

    def all_strategies(self) -> dict[str, Strategy]:
        """Return the strategies of the matrix and those for timings alone."""
        return {**self.strategies, **self.timed_strategies}

    def agent_of(self, number: str) -> Agent:
        """Return the settings of the search for a round: with what its search has of its own, and
        no searches."""
        name = self.rounds[number].search
        settings = {} if name is None else dict(self.agent.searches[name])
        changed = {key: value for key, value in settings.items() if value is not None}
        return self.agent.model_copy(update={**changed, "searches": {}})

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
            and timing.accumulation in (None, train.accumulation)
        ]

    def check_references(self) -> None:
        """Check references from one section to another, where both are present.

        Raises:
            UserError: a line for each mistake, with the key, what is wrong and the fix.
        """
        if mistakes := [*self._mistakes()]:
            raise UserError("\n".join(mistakes))

    def _mistakes(self) -> Iterator[str]:
        if wrong := [*self._in_batches()]:
            yield from wrong
            return  # what follows depends on the samples of a rank
        if self.strategies:
            yield from self._in_strategies()
            yield from self._in_methods()
        yield from self._in_tune()
        yield from self._in_timings()
        yield from self._in_links()
        yield from _said(self.tokenize.for_model, self.model.pretrained)
        yield from self._in_tokens()
        curve, steps = self.train.validation, self.train.steps
        if self.quality.val_loss and (curve is None or curve.every > steps):
            yield (
                "quality.val_loss: nothing is evaluated during training: set "
                f"train.validation.every to at most {steps}, or remove it"
            )
        if len(set(self.seeds)) < len(self.seeds):
            yield "seeds: a seed is named twice"
        yield from self._in_rounds()

    def _in_batches(self) -> Iterator[str]:
        train, agent = self.train, self.agent
        if train.global_batch_size is None:
            return
        yield from (wrong := _said(train.step_size, train.world_size))
        for name, timing in each_timing(self.timings).items():
            size = timing.world_size, timing.accumulation
            yield from (f"timings.{name}: {why}" for why in _said(train.step_size, *size))
        searches = agent.world_size, *(search.world_size for search in agent.searches.values())
        if not wrong and (self.tune is not None or {*searches} - {None, train.world_size}):
            batch = train.step_size(train.world_size).batch_size
            text = "tune, and a search on other ranks, need train.batch_size in its place"
            yield f"train.global_batch_size: {text}: {batch}"

    def _in_tokens(self) -> Iterator[str]:
        given, numbered = self.data.source == "tokens", self.tokenize.end_of_text is not None
        if numbered and not given:
            yield "tokenize.end_of_text: is for data.source tokens: remove it"
        named = (self.tokenize.tokenizer or self.model.pretrained or "train") != "train"
        if given and not numbered and not named:
            yield (
                "tokenize.tokenizer: name the one that the tokens were made with, or give "
                "tokenize.vocabulary and tokenize.end_of_text, the id that ends documents"
            )

    def _in_strategies(self) -> Iterator[str]:
        if self.baseline:
            yield from _unknown("baseline", self.baseline, self.strategies, "run")
        # what stands for the baseline is as wrong as it is
        if "start" in self.agent.model_fields_set and self.agent.start != self.baseline:
            yield from _unknown("agent.start", self.agent.start, self.strategies, "run")
        for name in self.timed_strategies:
            if name in self.strategies:
                yield f"timed_strategies.{name}: {name!r} is one of strategies, too"
        fitted = self.forecast.runs
        for i, name in enumerate(fitted if fitted != (self.baseline,) else ()):
            yield from _unknown(f"forecast.runs.{i}", name, self.all_strategies(), "strategy")
        for name, strategy in self.strategies.items():
            yield from self._unfit(f"strategies.{name}", strategy, self.train.world_size)

    def _in_timings(self) -> Iterator[str]:
        keys: dict[str, str] = {}
        for name, whole in self.timings.items():
            for part, timing in parts(whole, name).items():
                key = f"timings.{name}" + ("" if part == name else f".interleaved.{part}")
                if part in keys:
                    yield f"{key}: {keys[part]} has the same name: choose another"
                keys[part] = key
                if self.strategies:
                    yield from self._in_timing(key, timing)
        if keys and self.comparison:
            yield from _unknown("comparison", self.comparison, keys, "timing")
        for i, name in enumerate(self.forecast.timings if keys else ()):
            yield from _unknown(f"forecast.timings.{i}", name, keys, "timing")
            fitted = each_timing(self.timings).get(name)
            first = each_timing(self.timings).get(self.forecast.timings[0], fitted)
            ranks = {timing.world_size for timing in (fitted, first) if timing}
            if first and len(ranks) > 1 and self.train.global_batch_size:
                yield (
                    f"forecast.timings.{i}: by train.global_batch_size a rank of {name!r} has "
                    f"other samples than one of {self.forecast.timings[0]!r}: name timings on "
                    f"{first.world_size} ranks alone"
                )
            elif fitted and fitted.accumulation not in (None, self.train.accumulation):
                yield (
                    f"forecast.timings.{i}: {name!r} has {fitted.accumulation} micro-batches per "
                    f"step, train {self.train.accumulation}: name a timing that has as many"
                )

    def _in_links(self) -> Iterator[str]:
        train, agent = self.train, self.agent
        link, size = agent.link or train.link, agent.world_size or train.world_size
        timings = {f"timings.{name}": each for name, each in each_timing(self.timings).items()}
        places = {key: (timing.link, timing.world_size) for key, timing in timings.items()}
        places |= {"train": (train.link, train.world_size), "agent": (link, size)}
        for name, search in agent.searches.items():
            places[f"agent.searches.{name}"] = search.link or link, search.world_size or size
        for key, (each, ranks) in places.items():
            if each is not None:
                yield from (f"{key}.{why}" for why in _said(each.rates_of_nodes, ranks))

    def _in_timing(self, key: str, timing: Repetitions) -> Iterator[str]:
        strategies = self.all_strategies()
        for i, run in enumerate(timing.runs):
            if run in timing.runs[:i]:
                yield f"{key}.runs.{i}: {run!r} is named twice"
            elif run not in strategies:
                yield from _unknown(f"{key}.runs.{i}", run, strategies, "strategy")
            else:
                yield from self._unfit(
                    f"{key}.runs.{i}", strategies[run], timing.world_size, timing.accumulation
                )

    def _in_tune(self) -> Iterator[str]:
        tune, train = self.tune, self.train
        if tune is None:
            if self.methods:
                yield "methods: tune says what they are to reach: add it, or write methods: {}"
            return
        if not self.methods:
            yield "tune: nothing to tune: add methods, such as {stock: {strategies: [ddp]}}"
        rates, betas = tune.grid(train)
        if train.learning_rate not in rates:
            yield f"tune.learning_rates: add that of train, {train.learning_rate:g}, to begin there"
        if train.betas not in betas:
            yield f"tune.betas: add those of train, {[*train.betas]}, to begin there"
        for number in tune.micro_batches:
            if tune.first_steps(number, train) < 2:
                yield f"tune.micro_batches.{number}: the steps of train are too few: remove it"
        for name, method in self.methods.items():
            key, ranks = f"methods.{name}", method.ranks(train)
            for i, number in enumerate(method.micro_batches or ()):
                if number not in tune.micro_batches:
                    yield f"{key}.micro_batches.{i}: {number} is none of tune.micro_batches"
                elif number % ranks:
                    yield f"{key}.micro_batches.{i}: {ranks} ranks do not divide {number}"
            if not method.numbers(tune, train):
                yield f"{key}: {ranks} ranks divide none of tune.micro_batches: add {{{ranks}: 1}}"
            for i, rate in enumerate(method.learning_rates or ()):
                if rate not in rates:
                    yield f"{key}.learning_rates.{i}: {rate:g} is none of tune.learning_rates"
            seeds = method.seeds or ()
            if len({*seeds}) < len(seeds):
                yield f"{key}.seeds: a seed is named twice"
            if seeds and self.seeds and seeds[0] != self.seeds[0]:
                yield f"{key}.seeds: begin with {self.seeds[0]}, by which other methods are tuned"

    def _in_methods(self) -> Iterator[str]:
        strategies = self.all_strategies()
        for name, method in self.methods.items():
            for i, run in enumerate(method.strategies):
                key = f"methods.{name}.strategies.{i}"
                if run in method.strategies[:i]:
                    yield f"{key}: {run!r} is named twice"
                elif run not in strategies:
                    yield from _unknown(key, run, strategies, "strategy")
                else:
                    yield from [*self._unfit_method(key, method, strategies[run])][:1]
                    first, ranks = strategies.get(method.strategies[0]), method.ranks(self.train)
                    if first and _updates(first, ranks) != _updates(strategies[run], ranks):
                        yield (
                            f"{key}: {run!r} trains otherwise than {method.strategies[0]!r}: make "
                            "it a method of its own"
                        )

    def _unfit_method(self, key: str, method: Method, strategy: Strategy) -> Iterator[str]:
        tune, train, ranks = self.tune, self.train, method.ranks(self.train)
        if tune is None:
            return
        for number in {*method.numbers(tune, train)} & {*tune.micro_batches}:
            micro_batch = train.step_size(train.world_size).batch_size
            samples, steps = micro_batch * number // ranks, tune.first_steps(number, train)
            yield from _unfit(key, strategy, ranks, samples, steps)

    def _unfit(
        self, key: str, strategy: Strategy, world_size: int, accumulation: int | None = None
    ) -> Iterator[str]:
        train = self.train
        samples = train.step_size(world_size, accumulation).samples
        yield from _unfit(key, strategy, world_size, samples, train.steps)

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
                f"{self.train.world_size} ranks, the link ({link}) and the accumulation of train: "
                "change timings"
            )

    def _in_rounds(self) -> Iterator[str]:
        before = "results/results.jsonl"
        searches = [plan.search for plan in self.rounds.values()]
        for number, (name, plan) in enumerate(self.rounds.items(), start=1):
            key = f"rounds.{name}"
            if name != str(number):
                yield f"{key}: expected round '{number}' here: count up from '1'"
            elif plan.after != before:
                yield f"{key}.after: expected {before!r} (found {plan.after!r})"
            if plan.search not in (None, *self.agent.searches):
                yield f"{key}.search: {plan.search!r} is no search: add it to agent.searches"
            if plan.search in searches[: number - 1] and plan.search != searches[number - 2]:
                yield f"{key}.search: put the rounds of a search one after another"
            before = f"results/rounds/{name}/history.json"


def _unknown(key: str, name: str, valid: Collection[str], kind: str) -> Iterator[str]:
    if name not in valid:
        yield f"{key}: {name!r} is no {kind}; {nearest(name, valid)}"


def _unfit(
    key: str, strategy: Strategy, world_size: int, samples: int, steps: int
) -> Iterator[str]:
    yield from (f"{key}: {why}" for why in _said(check_fits, strategy, world_size, samples))
    if strategy.sync is not None:
        sync = strategy.sync
        first = sync.every + sync.warmup_steps
        if first > steps:
            yield (
                f"{key}.sync: the first exchange is after step {first} of {steps}: lower every "
                "or warmup_steps, or raise train.steps"
            )


def _updates(strategy: Strategy, world_size: int) -> tuple[Any, ...]:
    """Return what the updates of a strategy depend on, but for rounding."""
    full = strategy.canonical()
    weights, gradients = full.weights, full.gradients
    codecs = [gradients.codec, gradients.between_nodes, weights.codec if weights else None]
    rounded = all(codec is None or codec.name in ("none", "fp16", "bf16") for codec in codecs)
    sent = () if rounded else (gradients, weights)
    if rounded and full.sync is None and full.moment_dtype == "fp32":
        return ()
    # what a replica sends is what is compressed, and what it trains alone
    return (*sent, full.sync, full.moment_dtype, full.replica_count(world_size))


def _said(check: Callable[..., object], *arguments: object) -> list[str]:
    """Return what a check says of a mistake; nothing where there is none."""
    try:
        check(*arguments)
    except UserError as error:
        return [str(error)]
    return []
