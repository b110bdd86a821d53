"""Files and folders outside of the experiment, and the stages that read them."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from shardlab.config.parameters import Parameters
from shardlab.core.errors import UserError

CONTENTS = Path("data/contents")
"""where the stage content records `inputs`"""

_MODEL = ("model.pretrained", "model.config")
_READ = {
    "prepare": ("data.path",),
    "tokenize": ("tokenize.tokenizer",),
    "train": _MODEL,
    "timing": _MODEL,
    "estimate": _MODEL,
    "propose": _MODEL,
    "trial": _MODEL,
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
    data, options, model = params("data", "tokenize", "model")
    tokenizer = options.for_model(model).tokenizer
    return {
        "data.path": data.path,
        "model.pretrained": model.pretrained,
        "model.config": model.config,
        "tokenize.tokenizer": None if tokenizer in ("train", "gpt2") else tokenizer,
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


def contents_read(
    read: Mapping[str, Iterable[str]], contents: Mapping[str, str]
) -> dict[str, dict[str, str]]:
    """Return the digests of what each stage reads, by the names of the inputs.

    Args:
        read: from `inputs_of_stages`.
        contents: digest of each input.
    """
    return {stage: {name: contents[name] for name in names} for stage, names in read.items()}
