"""The pictures of the documents are those that their script draws."""

import re

import pytest

from docs.pictures import draw
from tests.pipeline.workspace import ROOT


@pytest.mark.parametrize("name", list(draw.PICTURES))
def test_committed_pictures_are_current(name: str) -> None:
    committed = (ROOT / f"docs/pictures/{name}.svg").read_text(encoding="utf-8")
    assert committed == draw.PICTURES[name]().svg(), "run python docs/pictures/draw.py"


def test_the_picture_of_layers_has_every_package_once() -> None:
    packages = [package for row in draw.bands(draw.contract()).values() for package in row]
    folders = {f"shardlab.{path.parent.name}" for path in (ROOT / "shardlab").glob("*/__init__.py")}
    assert sorted(packages) == sorted(folders | {"stages"})


@pytest.mark.parametrize("name", list(draw.PICTURES))
def test_no_text_leaves_its_box(name: str) -> None:
    """Estimated for wide fonts: 0.58 of the font size per character, 0.66 if bold."""
    width = float("inf")
    for line in draw.PICTURES[name]().svg().splitlines():
        if box := re.search(r'<rect .*?width="([\d.]+)".* stroke=', line):
            width = float(box[1])
        if words := re.search(r'size="(\d+)" .*weight="(\w+)".*"middle">(.+)</text>', line):
            per_character = int(words[1]) * (0.66 if words[2] == "bold" else 0.58)
            assert len(words[3]) * per_character < width, words[3]
