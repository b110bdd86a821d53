from pathlib import Path

import pytest

from benchmarks.islands.methods import parameters


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of records."""
    parameters()
    monkeypatch.chdir(tmp_path)
    return tmp_path
