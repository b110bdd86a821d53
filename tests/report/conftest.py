import pytest

from shardlab.report import plots, write


@pytest.fixture
def without_png(monkeypatch):
    """Figures are drawn as SVG; the PNG files are empty."""

    def save(figure, path, kind):
        path.touch() if kind == "png" else plots.save(figure, path, kind)

    monkeypatch.setattr(write, "save", save)


@pytest.fixture
def undrawn(monkeypatch):
    """Figures are empty files."""
    monkeypatch.setattr(write, "save", lambda figure, path, kind: path.touch())
