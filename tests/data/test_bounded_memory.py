"""Readers and writers take memory that does not depend on the size of the file."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

READ = """
import resource, sys
from pathlib import Path
from shardlab.data.settings import Data
from shardlab.data.sources import read_documents
from shardlab.data.source_records import RecordCounts
resource.setrlimit(resource.RLIMIT_DATA, (300 << 20, 300 << 20))
data = Data(source=sys.argv[1], path=sys.argv[2])
print(sum(len(d.text) for d in read_documents(data, Path("work"), RecordCounts("refuse", ""))))
"""
TEXT = "some words" * 100
RECORD = json.dumps({"text": TEXT})
SOURCES = {
    "json": (f"[{RECORD}", f", {RECORD}", "]"),
    "jsonl": (f"{RECORD}\n", f"{RECORD}\n", ""),
    "text": (TEXT, f"<|endoftext|>{TEXT}", ""),
}
PARTS, RECORDS = 400, 1000


@pytest.mark.long
@pytest.mark.parametrize("source", SOURCES)
def test_a_file_larger_than_the_memory_is_read(tmp_path, source):
    begin, record, end = (part.encode() for part in SOURCES[source])
    path = tmp_path / f"in.{source}.gz"
    middle = gzip.compress(record * RECORDS)
    with path.open("wb") as file:  # members of an archive, one after the other, are one file
        file.write(gzip.compress(begin))
        for _ in range(PARTS):
            file.write(middle)
        file.write(gzip.compress(end))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", READ, source, str(path)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) == (PARTS * RECORDS + 1) * len(TEXT)
