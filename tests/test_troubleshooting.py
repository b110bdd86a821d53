"""Messages that the page of troubleshooting quotes are those that the code and torch print."""

import ast
import re
from mmap import ACCESS_READ, mmap
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
OURS, OF_TORCH = (
    re.findall(r"^\| `([^`]+)` \|", part, re.M)
    for part in (ROOT / "docs/troubleshooting.md").read_text().split("## Messages of torch")
)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """All texts of the code, with … where a value stands."""
    files = [path for package in ("shardlab", "stages") for path in (ROOT / package).rglob("*.py")]
    return [
        "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in parts)
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        for parts in [node.values if isinstance(node, ast.JoinedStr) else [node]]
        if isinstance(parts[0], ast.Constant | ast.FormattedValue)
    ]


@pytest.mark.parametrize("message", OURS)
def test_a_quoted_message_is_in_the_code(message: str, texts: list[str]) -> None:
    pattern = re.compile(re.escape(message).replace("…", ".*"), re.DOTALL)
    assert any(pattern.search(text) for text in texts)


@pytest.mark.long  # torch has 400 MB
@pytest.mark.parametrize("message", OF_TORCH)
def test_a_quoted_message_of_torch_is_in_torch(message: str) -> None:
    package = Path(torch.__file__).parent
    files = [package / "distributed/distributed_c10d.py", package / "distributed/run.py"]
    for part in filter(None, map(str.strip, message.split("…"))):
        found = any(part in path.read_text() for path in files)
        with (package / "lib/libtorch_cpu.so").open("rb") as library:
            content = mmap(library.fileno(), 0, access=ACCESS_READ)
            assert found or content.find(part.encode()) >= 0, part
