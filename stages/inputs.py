"""Say what each stage reads outside of the experiment, by content: data/inputs/STAGE.json."""

from collections.abc import Mapping
from pathlib import Path

from shardlab.core.errors import UserError
from shardlab.core.files import read_json, write_json
from shardlab.experiment.parameters import Parameters
from stages.common import require, run

CONTENTS = Path("data/contents")
"""where the stage content records `inputs`"""
_FOLDER = Path("data/inputs")

_MODEL = ("model.pretrained", "model.config")
_JUDGED = (*_MODEL, "agent.model")
_READ = {
    "prepare": ("data.path",),
    "tokenize": ("tokenize.tokenizer",),
    "train": _MODEL,
    "timing": _MODEL,
    "estimate": _MODEL,
    "propose": _JUDGED,
    "trial": _MODEL,
    "policies": _JUDGED,
}
"""parameters that name what a stage reads"""


def inputs_of_stages(params: Parameters) -> dict[str, list[str]]:
    """Return the names of the inputs that each stage reads.

    Raises:
        UserError: a parameter names a file or folder that is no input, nor in one.
    """
    held = {key: _input_of(key, path, params) for key, path in _named(params).items()}
    return {
        stage: sorted({name for key in keys if (name := held[key]) is not None})
        for stage, keys in _READ.items()
    }


def _named(params: Parameters) -> dict[str, str | None]:
    data, options, model, agent = params("data", "tokenize", "model", "agent")
    tokenizer = options.for_model(model).tokenizer
    return {
        "data.path": data.path,
        "model.pretrained": model.pretrained,
        "model.config": model.config,
        "tokenize.tokenizer": None if tokenizer in ("train", "gpt2") else tokenizer,
        "agent.model": agent.model if agent.judge in ("local", "replay") else None,
    }


def _input_of(key: str, path: str | None, params: Parameters) -> str | None:
    """Return the name of the input that holds a path, the nearest of several; None for what is not
    there: a name on the Hugging Face hub, or the stage says so."""
    if not path or not Path(path).exists():
        return None
    given: dict[str, str] = params("inputs")
    known = {name: Path(each).absolute() for name, each in given.items()}
    holding = [name for name in known if Path(path).absolute().is_relative_to(known[name])]
    if not holding:
        raise UserError(
            f"{key}: {path} is none of inputs, so a change of its content would repeat nothing: "
            f"write inputs: {{outside: {path}}}"
        )
    return max(holding, key=lambda name: len(known[name].parts))


def read_by_stages(params: Parameters, contents: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return what each stage reads: digests of the contents, by the names of the inputs."""
    return {
        stage: {name: contents[name] for name in names}
        for stage, names in inputs_of_stages(params).items()
    }


def main(params: Parameters) -> None:
    """Write data/inputs/STAGE.json."""
    records = {name: CONTENTS / f"{name}.json" for name in params("inputs")}
    for name, path in records.items():
        require(path, f"content {name}")
    contents = {name: read_json(path)["sha256"] for name, path in records.items()}
    for stage, read in read_by_stages(params, contents).items():
        write_json(_FOLDER / f"{stage}.json", read)


if __name__ == "__main__":
    run(main)
