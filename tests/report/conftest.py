import pytest

from shardlab.report import write


@pytest.fixture
def undrawn(monkeypatch):
    """Figures are empty files."""
    monkeypatch.setattr(write, "save", lambda figure, path: path.touch())
