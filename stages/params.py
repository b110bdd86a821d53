"""Validate params.yaml; write what stages depend on: data/params.yaml and data/code.yaml.

Both tools compare single keys of these files. In data/params.yaml every default is written out,
strategies are in canonical form, and names stand for nothing else: a timing holds the hashes of its
strategies, a method that of the one that it trains, a round the settings of its search. So another
spelling of the same repeats nothing. Stages read params.yaml in the same form: `stages.sections`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from shardlab.config.canonical import canonical
from shardlab.config.experiment import Params
from shardlab.config.parameters import Parameters
from shardlab.core.errors import UserError
from shardlab.core.files import write_text
from shardlab.core.progress import say
from shardlab.results.timing_parts import each_timing
from stages.code import code_keys, timed_runs
from stages.inputs import FOLDER, content_of
from stages.sections import Sections


def parameter_keys(values: Params) -> dict[str, Any]:
    """Return what stages depend on: the sections that they read, the hashes of what they time and
    tune, and the content of the files that parameters name.

    Raises:
        UserError: the parameters name a path that is no input.
    """
    tree = canonical(values)
    strategies = values.all_strategies()
    for name, timing in values.timings.items():
        runs = sorted(timed_runs(timing))
        tree["timings"][name]["strategies"] = {run: strategies[run].hash() for run in runs}
    for name, method in values.methods.items():
        tree["methods"][name]["strategy"] = strategies[method.strategies[0]].hash()
    timings = each_timing(values.timings)
    timed = {run for timing in values.timings.values() for run in timed_runs(timing)}
    # ranks and codecs whose operations calibrate times
    world_sizes = [timings[name].world_size for name in values.forecast.timings]
    tree["calibration"] = {
        "world_sizes": [*dict.fromkeys(world_sizes)],
        "strategies": sorted({strategies[run].hash() for run in timed}),
    }
    tree["contents"] = read_contents(values)
    return tree


def read_contents(values: Params) -> dict[str, str | None]:
    """Return the digest of the input that each parameter with a path names; None for what is not
    there: a name on the Hugging Face hub, or the stage that reads it says so.

    Raises:
        UserError: a parameter names a file or folder that is no input, nor in one.
    """
    data, model = values.data, values.model
    tokenizer = values.tokenize.for_model(model.pretrained).tokenizer
    path_of_tokenizer = None if tokenizer in ("train", "gpt2") else tokenizer
    paths = {
        "corpus": ("data.path", data.path),
        "model": (
            "model.pretrained" if model.pretrained else "model.config",
            model.pretrained or model.config,
        ),
        "tokenizer": ("tokenize.tokenizer", path_of_tokenizer),
    }
    holding = {name: _input_of(values.inputs, *named) for name, named in paths.items()}
    return {
        name: None if source is None else content_of(values.inputs, source).sha256
        for name, source in holding.items()
    }


def _input_of(inputs: Mapping[str, str], key: str, path: str | None) -> str | None:
    """Return the name of the input that holds a path, the nearest of several."""
    if not path or not Path(path).exists():
        return None
    places = {name: Path(place).absolute() for name, place in inputs.items()}
    holding = [name for name in places if Path(path).absolute().is_relative_to(places[name])]
    if not holding:
        raise UserError(
            f"{key}: {path} is none of inputs, so a change of its content would repeat nothing: "
            f"write inputs: {{outside: {path}}}"
        )
    return max(holding, key=lambda name: len(places[name].parts))


def main(params: Sections) -> None:
    """Write both files; remove records of former inputs."""
    values = Parameters(params.path, params.overrides).complete()
    FOLDER.mkdir(parents=True, exist_ok=True)  # on which this stage depends in DVC
    for record in FOLDER.glob("*.json"):
        if record.stem not in values.inputs:
            record.unlink()
    for name, tree in (("params", parameter_keys(values)), ("code", code_keys(values))):
        write_text(Path("data", f"{name}.yaml"), yaml.safe_dump(tree, sort_keys=False))
    steps = values.train.steps
    for name, strategy in values.strategies.items():
        for sent in (strategy.gradients, strategy.sync):
            if left_out := sent and sent.left_out(steps):
                say(f"params: warning: {name}: {left_out}")
    say("params: params.yaml is valid")
