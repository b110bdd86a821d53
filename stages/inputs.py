"""Record what a file or folder outside of the experiment holds: data/inputs/NAME.json."""

from pathlib import Path

from shardlab.config.parameters import Parameters
from shardlab.core.content import Content
from shardlab.core.errors import UserError
from shardlab.core.progress import say
from stages.common import run

FOLDER = Path("data/inputs")


def content_of(params: Parameters, name: str) -> Content:
    """Return the content of an input; links to folders are not followed.

    Raises:
        UserError: there is nothing, or it cannot be read.
    """
    record, path = FOLDER / f"{name}.json", params("inputs")[name]
    known = Content.from_file(record, f"remove {record}") if record.exists() else None
    try:
        found = Content.of(path, known)
    except OSError as error:
        raise UserError(f"inputs.{name}: {error.filename or path}: {error.strerror}") from None
    if found is None:
        what = "an empty folder" if Path(path).is_dir() else "no such file"
        raise UserError(f"inputs.{name}: {path}: {what}")
    return found


def read_contents(params: Parameters) -> dict[str, str | None]:
    """Return the digest of the input that each parameter with a path names; None for what is not
    there: a name on the Hugging Face hub, or the stage that reads it says so.

    Raises:
        UserError: a parameter names a file or folder that is no input, nor in one.
    """
    data, options, model = params("data", "tokenize", "model")
    tokenizer = options.for_model(model).tokenizer
    given = None if tokenizer in ("train", "gpt2") else tokenizer
    paths = {
        "corpus": ("data.path", data.path),
        "model": (
            "model.pretrained" if model.pretrained else "model.config",
            model.pretrained or model.config,
        ),
        "tokenizer": ("tokenize.tokenizer", given),
    }
    holding = {name: _input_of(params, *named) for name, named in paths.items()}
    return {
        name: None if source is None else content_of(params, source).sha256
        for name, source in holding.items()
    }


def _input_of(params: Parameters, key: str, path: str | None) -> str | None:
    """Return the name of the input that holds a path, the nearest of several."""
    if not path or not Path(path).exists():
        return None
    inputs: dict[str, Path] = {
        name: Path(given).absolute() for name, given in params("inputs").items()
    }
    holding = [name for name in inputs if Path(path).absolute().is_relative_to(inputs[name])]
    if not holding:
        raise UserError(
            f"{key}: {path} is none of inputs, so a change of its content would repeat nothing: "
            f"write inputs: {{outside: {path}}}"
        )
    return max(holding, key=lambda name: len(inputs[name].parts))


def main(params: Parameters, name: str) -> None:
    """Write data/inputs/NAME.json."""
    if name not in params("inputs"):
        raise UserError(f"inputs.{name}: missing from params.yaml")
    content_of(params, name).to_file(FOLDER / f"{name}.json")
    say(f"inputs {name}: {params('inputs')[name]}")


if __name__ == "__main__":
    run("inputs", main)
