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

BEGIN, END = "<!-- headline:begin -->", "<!-- headline:end -->"


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


def block(text: str) -> str:
    """Return a text between the markers.

    Raises:
        UserError: the text holds a marker itself.
    """
    if BEGIN in text or END in text:
        raise UserError("headline: holds a marker of the README's block: write the report again")
    return f"{BEGIN}\n{text.strip()}\n{END}"


def replace_block(path: Path, content: str) -> None:
    """Replace what is between the markers of a text file; the rest stays byte for byte.

    A file that already holds it is not written.

    Raises:
        UserError: no such file, or its markers are not there exactly once and in order.
    """
    new = block(content)
    try:
        # bytes, because reading as text would change the line endings
        text = path.read_bytes().decode()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file: add it, with {BEGIN} and {END} in it") from None
    first, last = text.find(BEGIN), text.find(END)
    if text.count(BEGIN) != 1 or text.count(END) != 1 or last < first:
        raise UserError(
            f"{path}: expected {BEGIN} and, below it, {END}, each once: "
            "add the two lines where the headline belongs"
        )
    changed = text[:first] + new + text[last + len(END) :]
    if changed != text:
        write_text(path, changed)
