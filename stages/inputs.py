"""Record what a file or folder outside of the experiment holds: data/inputs/NAME.json."""

from collections.abc import Mapping
from pathlib import Path

from shardlab.core.content import Content
from shardlab.core.errors import UserError
from shardlab.core.progress import say
from stages.sections import Sections

FOLDER = Path("data/inputs")


def content_of(inputs: Mapping[str, str], name: str) -> Content:
    """Return the content of an input; links to folders are not followed.

    Raises:
        UserError: there is nothing, or it cannot be read.
    """
    record, path = FOLDER / f"{name}.json", inputs[name]
    known = Content.from_file(record, f"remove {record}") if record.exists() else None
    try:
        found = Content.of(path, known)
    except OSError as error:
        raise UserError(f"inputs.{name}: {error.filename or path}: {error.strerror}") from None
    if found is None:
        what = "an empty folder" if Path(path).is_dir() else "no such file"
        raise UserError(f"inputs.{name}: {path}: {what}")
    return found


def main(params: Sections, name: str) -> None:
    """Write data/inputs/NAME.json."""
    inputs = params("inputs", dict[str, str])
    if name not in inputs:
        raise UserError(f"inputs.{name}: missing from params.yaml")
    content_of(inputs, name).to_file(FOLDER / f"{name}.json")
    say(f"inputs {name}: {inputs[name]}")
