"""Validate params.yaml as a whole, and write what each stage uses of it: its plan.

A function for each stage returns the values that it uses, and the stage reads no others: sections
hold the named fields alone, all else is at its default. In canonical form, as JSON, these values
are the plan of the stage. Stages read params.yaml; the tools compare plans, so that a change
repeats the stages whose plans it changes.

DVC removes the outputs of a stage before it runs it, whatever their names: the stages with names
come after this one. Snakemake validates the parameters while it reads the Snakefile, too.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shardlab.core.document import Document
from shardlab.core.files import write_text
from shardlab.experiment.parameters import Parameters
from shardlab.experiment.schema import Data, Forecast, Params, Space, Train
from shardlab.strategy.strategy import Strategy
from stages.common import run as run_stage

Values = dict[str, Any]

_FOLDER = Path("data/plans")

_SAMPLES = ("batch_size", "accumulation", "sequence_length")
_CPUS = ("threads", "placement")


def prepare(params: Parameters) -> Values:  # noqa: D103
    # the split is made of tokens
    unsplit = {"validation_share": Data.model_fields["validation_share"].default}
    return {"data": params("data").model_copy(update=unsplit)}


def tokenize(params: Parameters) -> Values:  # noqa: D103
    data, model, options = params("data", "model", "tokenize")
    return {"validation_share": data.validation_share, "options": options.for_model(model)}


def train(params: Parameters, run: str) -> Values:  # noqa: D103
    strategy, of_train, model = params(f"strategies.{run}", "train", "model")
    return {"strategy": strategy, "train": of_train.only(*Train.model_fields), "model": model}


def validate(params: Parameters) -> Values:  # noqa: D103
    of_train, model = params("train", "model")
    return {"train": of_train.only(*_CPUS, "sequence_length"), "model": model}


def timing(params: Parameters, name: str) -> Values:  # noqa: D103
    timed, strategies = params(f"timings.{name}", "strategies")
    of_train, model = params("train", "model")
    used = (*_CPUS, *_SAMPLES, "deterministic", "weight_decay", "clip", "profiled_steps")
    return {
        "timing": timed,
        "strategies": {run: strategies[run] for run in timed.runs},
        "train": of_train.only(*used),
        "model": model,
    }


def calibrate(params: Parameters) -> Values:
    """Networks are those of the timings that the forecast is fitted on, strategies of all."""
    forecast_, strategies, timings, of_train = params("forecast", "strategies", "timings", "train")
    runs = {run for timed in timings.values() for run in timed.runs}
    timed_strategies = {strategies[run].canonical() for run in runs}
    return {
        "networks": [(timings[name].world_size, timings[name].link) for name in forecast_.timings],
        "strategies": sorted(timed_strategies, key=Strategy.hash),
        "space": forecast_.space,
        "train": of_train.only(*_CPUS, "world_size"),
    }


def forecast(params: Parameters) -> Values:  # noqa: D103
    fitted, timings = params("forecast", "timings")
    return {"forecast": fitted.model_copy(update={"space": Space()}), "timings": timings}


def estimate(params: Parameters) -> Values:  # noqa: D103
    model, runs, strategies, of_train = params("model", "runs", "strategies", "train")
    return {
        "model": model,
        "strategies": {run: strategies[run] for run in runs},
        "train": of_train.only(*_SAMPLES, "world_size", "clip"),
    }


def collect(params: Parameters) -> Values:  # noqa: D103
    runs, seeds, timings, quality = params("runs", "seeds", "timings", "quality")
    return {"runs": runs, "seeds": seeds, "timings": timings, "quality": quality}


def propose(params: Parameters, number: str) -> Values:  # noqa: D103
    forecast_, timings, of_train, model = params("forecast", "timings", "train", "model")
    return {
        **_round(params, number),
        "forecast": _fit(forecast_),
        "timings": timings,
        "train": of_train.only(*_SAMPLES, "threads", "clip", "link"),
        "model": model,
    }


def _fit(whole: Forecast) -> Forecast:
    """Return what a fit depends on, without what it extrapolates to."""
    return whole.model_copy(update={"ranks": (), "links": ()})


def trial(params: Parameters, number: str) -> Values:  # noqa: D103
    of_train, model, seeds = params("train", "model", "seeds")
    whole = of_train.only(*Train.model_fields)
    return {**_round(params, number), "train": whole, "model": model, "seeds": seeds}


def decide(params: Parameters, number: str) -> Values:  # noqa: D103
    timings, of_train = params("timings", "train")
    return {**_round(params, number), "timings": timings, "train": of_train.only("link")}


def _round(params: Parameters, number: str) -> Values:
    plan, agent = params(f"rounds.{number}", "agent")
    return {"round": plan, "agent": agent.of(plan)}


def policies(params: Parameters) -> Values:  # noqa: D103
    policies_, timings, comparison, agent = params("policies", "timings", "comparison", "agent")
    if not policies_.timings:
        return {"policies": policies_}
    forecast_, of_train, model = params("forecast", "train", "model")
    return {
        "policies": policies_,
        "timings": timings,
        "comparison": comparison,
        "agent": agent,
        "forecast": _fit(forecast_),
        "train": of_train.only(*_SAMPLES, "threads", "clip", "link"),
        "model": model,
    }


def report(params: Parameters) -> Values:  # noqa: D103
    runs, seeds, baseline, last = params("runs", "seeds", "baseline", "last_round")
    timings, compared, quality = params("timings", "comparison", "quality")
    return {
        "runs": runs,
        "seeds": seeds,
        "baseline": baseline,
        "last_round": last,
        "timings": timings,
        "comparison": compared,
        "quality": quality,
    }


_OF_ITEMS: dict[str, tuple[Callable[..., Values], ...]] = {
    "runs": (train,),
    "timings": (timing,),
    "rounds": (propose, trial, decide),
}
"""stages that have a plan for each item of a section"""
_OTHERS = (
    *(prepare, tokenize, validate, calibrate, forecast, estimate, collect, policies, report),
)


def plans(params: Parameters) -> dict[str, str]:
    """Return the plans of all stages as JSON text, by the names of their files: STAGE, STAGE/ITEM.

    Raises:
        UserError: the parameters are not complete.
    """
    found = {each.__name__: each(params) for each in _OTHERS}
    for section, stages in _OF_ITEMS.items():
        for each in stages:
            found |= {f"{each.__name__}/{item}": each(params, item) for item in params(section)}
    return {
        name: json.dumps(_plain(found[name]), indent=1, sort_keys=True) + "\n"
        for name in sorted(found)
    }


def _plain(value: Any) -> Any:
    """Return plain data that is equal for equal meanings."""
    match value:
        case Strategy():
            return value.canonical().model_dump(mode="json")
        case Train():
            return value.given()
        case Document():
            return value.model_dump(mode="json")
        case Mapping():
            return {key: _plain(each) for key, each in value.items()}
        case list() | tuple():
            return [_plain(each) for each in value]
    return value


def main(params: Parameters) -> None:
    """Write data/plans/STAGE.json and data/plans/STAGE/ITEM.json, and remove all others."""
    params(*Params.model_fields)
    found = {_FOLDER / f"{name}.json": text for name, text in plans(params).items()}
    for path, text in found.items():
        write_text(path, text)
    for path in _FOLDER.rglob("*.json"):
        if path not in found:
            path.unlink()


if __name__ == "__main__":
    run_stage(main)
