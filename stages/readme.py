"""Write the headline table into the README."""

import os
import sys
from pathlib import Path

from shardlab.core.errors import UserError
from shardlab.core.files import write_text
from shardlab.core.progress import say
from stages.common import require
from stages.sections import Sections
from stages.summary import summarize


def markers(name: str) -> tuple[str, str]:
    """Return the lines before and after a block."""
    return f"<!-- {name}:begin -->", f"<!-- {name}:end -->"


BEGIN, END = markers("headline")


def main(params: Sections) -> None:
    """Update the block between the markers of README.md; write it to results/report/readme.md."""
    path = Path("results/report/headline.md")
    require(path, "report")
    headline = path.read_text(encoding="utf-8")
    replace_block(Path("README.md"), headline)
    write_text("results/report/readme.md", block(headline) + "\n")
    if "DVC_STAGE" in os.environ:  # which has no other place to call us after its last stage
        print(summarize(os.getppid()), file=sys.stderr)
    say("readme: the headline table in README.md is up to date")


def block(text: str, name: str = "headline") -> str:
    """Return a text between the markers of a block.

    Raises:
        UserError: the text holds a marker itself.
    """
    begin, end = markers(name)
    if begin in text or end in text:
        raise UserError(f"{name}: holds a marker of the README's block: write the report again")
    return f"{begin}\n{text.strip()}\n{end}"


def replace_block(path: Path, content: str, name: str = "headline") -> None:
    """Replace the block between the markers of a text file; the rest stays byte for byte.

    A file that already holds it is not written.

    Raises:
        UserError: no such file, or its markers are not there exactly once and in order.
    """
    new, (begin, end) = block(content, name), markers(name)
    try:
        # bytes, because reading as text would change the line endings
        text = path.read_bytes().decode()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file: add it, with {begin} and {end} in it") from None
    first, last = text.find(begin), text.find(end)
    if text.count(begin) != 1 or text.count(end) != 1 or last < first:
        raise UserError(
            f"{path}: expected {begin} and, below it, {end}, each once: "
            f"add the two lines where the {name} belongs"
        )
    changed = text[:first] + new + text[last + len(end) :]
    if changed != text:
        write_text(path, changed)
