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

from shardlab.config.model_and_data import Data
from shardlab.config.parameters import Parameters
from shardlab.config.schema import Forecast, Params, Space, Train, each_timing
from shardlab.config.strategy import Strategy
from shardlab.core.document import Document
from shardlab.core.errors import UserError
from shardlab.core.files import write_text
from stages.common import run as run_stage
from stages.outside import CONTENTS, inputs_of_stages

Values = dict[str, Any]

_FOLDER = Path("data/plans")

_SAMPLES = ("batch_size", "accumulation", "sequence_length")
_CPUS = ("threads", "placement")


def content(params: Parameters, name: str) -> Values:  # noqa: D103
    return {"path": params("inputs")[name]}


def inputs(params: Parameters) -> Values:  # noqa: D103
    return {"read": inputs_of_stages(params)}


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
    timings = params("timings")
    for whole, timed in timings.items():
        if name in timed.interleaved:
            raise UserError(f"timing {name} is part of timing {whole}: name that")
    timed, strategies = params(f"timings.{name}"), _strategies(params)
    of_train, model = params("train", "model")
    runs = {run for part in timed.parts(name).values() for run in part.runs}
    used = (*_CPUS, *_SAMPLES, "deterministic", "weight_decay", "clip", "profiled_steps")
    return {
        "timing": timed,
        "strategies": {run: strategies[run] for run in sorted(runs)},
        "train": of_train.only(*used),
        "model": model,
    }


def calibrate(params: Parameters) -> Values:
    """Networks are those of the timings that the forecast is fitted on, strategies of all."""
    forecast_, of_train = params("forecast", "train")
    timings = each_timing(params("timings"))
    strategies = _strategies(params)
    runs = {run for timed in timings.values() for run in timed.runs}
    timed = {strategies[run].canonical() for run in runs}
    return {
        "networks": [(timings[name].world_size, timings[name].link) for name in forecast_.timings],
        "strategies": sorted(timed, key=Strategy.hash),
        "space": forecast_.space,
        "train": of_train.only(*_CPUS, "world_size"),
    }


def _strategies(params: Parameters) -> dict[str, Strategy]:
    """Return the strategies of the matrix and those for timings alone."""
    matrix, timed = params("strategies", "timed_strategies")
    return {**matrix, **timed}


def forecast(params: Parameters) -> Values:  # noqa: D103
    fitted, timings = params("forecast", "timings")
    return {"forecast": fitted.model_copy(update={"space": Space()}), "timings": timings}


def estimate(params: Parameters) -> Values:  # noqa: D103
    of_train = params("train")
    return {
        **_sections(params, "model", "strategies"),
        "train": of_train.only(*_SAMPLES, "world_size", "clip"),
    }


def collect(params: Parameters) -> Values:  # noqa: D103
    runs = sorted(params("strategies"))
    return {"runs": runs, **_sections(params, "seeds", "timings", "quality")}


def _sections(params: Parameters, *names: str) -> Values:
    return {name: params(name) for name in names}


def propose(params: Parameters, number: str) -> Values:  # noqa: D103
    return {**_round(params, number), **_evidence(params)}


def _evidence(params: Parameters) -> Values:
    """Return what evidence for the judge is made with."""
    forecast_, of_train = params("forecast", "train")
    return {
        **_sections(params, "timings", "model"),
        "forecast": _fit(forecast_),
        "train": of_train.only(*_SAMPLES, "threads", "clip", "link"),
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


def report(params: Parameters) -> Values:  # noqa: D103
    *_, last = params("rounds")
    named = _sections(params, "seeds", "baseline", "timings", "comparison", "quality")
    return {"runs": [*params("strategies")], "last_round": last, **named}


_OF_ITEMS: dict[str, tuple[Callable[..., Values], ...]] = {
    "inputs": (content,),
    "strategies": (train,),
    "timings": (timing,),
    "rounds": (propose, trial, decide),
}
"""stages that have a plan for each item of a section"""
_OTHERS = (
    *(inputs, prepare, tokenize, validate, calibrate, forecast, estimate),
    *(collect, report),
)

_ENCODING = ("train", "timing", "calibrate", "estimate", "trial")
"""stages that run codecs: their plans name the modules of `codecs`, which are loaded for them"""


def plans(params: Parameters) -> dict[str, str]:
    """Return the plans of all stages as JSON text, by the names of their files: STAGE, STAGE/ITEM.

    Raises:
        UserError: the parameters are not complete, or name a path that is no input.
    """
    found = {each.__name__: each(params) for each in _OTHERS}
    for section, stages in _OF_ITEMS.items():
        for each in stages:
            found |= {f"{each.__name__}/{item}": each(params, item) for item in params(section)}
    for name in found:
        if name.partition("/")[0] in _ENCODING:
            found[name] |= {"codecs": params("codecs")}
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
    """Write data/plans/STAGE.json and data/plans/STAGE/ITEM.json; remove those of no stage, and
    the contents of former inputs."""
    params(*Params.model_fields)
    CONTENTS.mkdir(parents=True, exist_ok=True)  # on which DVC's inputs depends, if empty too
    found = {_FOLDER / f"{name}.json": text for name, text in plans(params).items()}
    for path, text in found.items():
        write_text(path, text)
    known = {CONTENTS / f"{name}.json" for name in params("inputs")}
    for path in (*_FOLDER.rglob("*.json"), *CONTENTS.glob("*.json")):
        if path not in found and path not in known:
            path.unlink()


if __name__ == "__main__":
    run_stage(main)
