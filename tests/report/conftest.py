from pathlib import Path

import pytest

from shardlab.report import plots, write


@pytest.fixture
def without_png(monkeypatch):
    """Figures are drawn as SVG; the PNG files are empty."""

    def save(figure, file, kind):
        if isinstance(file, Path):
            file.touch()
        else:
            plots.save(figure, file, kind)

    monkeypatch.setattr(write, "save", save)


@pytest.fixture
def undrawn(monkeypatch):
    """Figures are empty, on the page and in files."""

    def save(figure, file, kind):
        (file.write_text if isinstance(file, Path) else file.write)("<svg></svg>")

    monkeypatch.setattr(write, "save", save)
