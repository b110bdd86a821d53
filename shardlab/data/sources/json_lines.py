"""Records of a file with one JSON object per line."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardlab.data.corpus.document import Tally


def read_json_lines(path: Path, tally: Tally) -> Iterator[tuple[str, int, Any]]:
    """Yield position, line number from 1 and value; empty lines are skipped.

    A line that is not JSON is a bad record, named with the byte offset of the error.
    """
    offset = 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    value = json.loads(line)
                except UnicodeDecodeError as error:
                    tally.bad(f"line {number}, byte {offset + error.start}", "not UTF-8")
                except json.JSONDecodeError as error:
                    place = offset + len(error.doc[: error.pos].encode())
                    tally.bad(f"line {number}, byte {place}", "not JSON")
                except RecursionError:
                    tally.bad(f"line {number}, byte {offset}", "nested too deeply")
                else:
                    yield f"line {number}", number, value
            offset += len(line)
