"""Validate params.yaml; write what stages depend on: data/params.yaml and data/code.yaml.

Both tools compare single keys of these files. In data/params.yaml every default is written out,
strategies are in canonical form, and names stand for nothing else: a timing holds the hashes of its
strategies, a method the one that it trains, a round the settings of its search. So another spelling
of the same repeats nothing. Stages themselves read params.yaml.
"""

from pathlib import Path
from typing import Any

import yaml

from shardlab.config.experiment import Params
from shardlab.config.parameters import Parameters
from shardlab.core.document import Document
from shardlab.core.files import write_text
from shardlab.core.progress import say
from shardlab.results.settings import Timing, each_timing
from shardlab.strategy.document import Strategy
from stages.code import code_keys
from stages.common import run
from stages.inputs import FOLDER, read_contents


def canonical(params: Parameters) -> dict[str, Any]:
    """Return all parameters as plain data that is equal for equal meanings.

    Raises:
        UserError: the parameters are not complete, or name a path that is no input.
    """
    values = params.complete()
    tree = {name: _plain(getattr(values, name)) for name in Params.model_fields}
    tree["tokenize"] = _plain(values.tokenize.for_model(values.model))
    strategies = params.all_strategies()
    for name, timing in values.timings.items():
        tree["timings"][name]["strategies"] = _hashes(timing, name, strategies)
    for name, method in values.methods.items():
        trained = strategies[method.strategies[0]]
        tree["methods"][name]["strategy"] = trained.canonical().model_dump(mode="json")
    for number in values.rounds:
        tree["rounds"][number]["agent"] = _plain(params.agent_of(number))
    timings = each_timing(values.timings)
    runs = {run for timing in timings.values() for run in timing.runs}
    # ranks and codecs whose operations calibrate times
    world_sizes = [timings[name].world_size for name in values.forecast.timings]
    tree["calibration"] = {
        "world_sizes": [*dict.fromkeys(world_sizes)],
        "strategies": sorted({strategies[run].hash() for run in runs}),
    }
    tree["contents"] = read_contents(params)
    return tree


def _hashes(timing: Timing, name: str, strategies: dict[str, Strategy]) -> dict[str, str]:
    runs = {run for part in timing.parts(name).values() for run in part.runs}
    return {run: strategies[run].hash() for run in sorted(runs)}


def _plain(value: Any) -> Any:
    match value:
        case Strategy():
            return value.canonical().model_dump(mode="json")
        case Document():
            return value.model_dump(mode="json")
        case dict():
            return {key: _plain(value[key]) for key in sorted(value)}
        case list() | tuple():
            return [_plain(item) for item in value]
    return value


def main(params: Parameters) -> None:
    """Write both files; remove records of former inputs."""
    FOLDER.mkdir(parents=True, exist_ok=True)  # on which this stage depends in DVC
    for record in FOLDER.glob("*.json"):
        if record.stem not in params("inputs"):
            record.unlink()
    for name, tree in (("params", canonical(params)), ("code", code_keys(params))):
        write_text(Path("data", f"{name}.yaml"), yaml.safe_dump(tree, sort_keys=False))
    steps = params("train").steps
    for name, strategy in params("strategies").items():
        for sent in (strategy.gradients, strategy.sync):
            if left_out := sent and sent.left_out(steps):
                say(f"params: warning: {name}: {left_out}")
    say("params: params.yaml is valid")


if __name__ == "__main__":
    run("params", main)
