"""Sections of the canonical form, read by the settings of single packages."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from shardlab.choose.settings import Agent
from shardlab.config.experiment import Params
from shardlab.config.parameters import Parameters
from shardlab.core.errors import UserError
from shardlab.train.settings import Train
from stages.sections import Sections
from tests.pipeline.workspace import ROOT

FILES = [ROOT / "params.yaml", *sorted((ROOT / "params").glob("*.yaml"))]
APART = {"strategies", "timed_strategies", "tokenize", "rounds"}
"""sections whose canonical form is another document"""


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_sections_are_those_of_the_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    values, sections = Parameters(path).complete(), Sections(path)
    for name, field in Params.model_fields.items():
        kind: Any = field.annotation
        if name not in APART:
            assert sections(name, kind) == getattr(values, name)
    for name in ("strategies", "timed_strategies"):
        kind = Params.model_fields[name].annotation
        read, written = sections(name, kind), getattr(values, name)
        assert {key: strategy.canonical() for key, strategy in read.items()} == {
            key: strategy.canonical() for key, strategy in written.items()
        }
    for number in values.rounds:
        assert sections(f"rounds.{number}.agent", Agent) == values.agent_of(number)
        assert sections(f"rounds.{number}.search", str | None) == values.rounds[number].search


def test_of_a_section_only_what_is_named_is_read() -> None:
    sections = Sections(ROOT / "params/quick.yaml", ["train.threads=2", "train.steps=30"])
    assert sections("train", Train, "threads") == Train(threads=2)
    assert sections.arguments == [
        f"--params={ROOT / 'params/quick.yaml'}",
        *("--set=train.threads=2", "--set=train.steps=30"),
    ]


def test_what_is_absent_is_said_by_who_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_text(yaml.safe_dump({"strategies": {"one": {"engine": "ddp"}}}))
    sections = Sections(path)
    assert sections("train", Train) == Train()
    with pytest.raises(UserError, match=r"^seeds: missing from .*: add it, such as seeds: \[0\]$"):
        sections("seeds", list[int])
    with pytest.raises(UserError, match=r"^strategies\.on: missing from .*; did you mean 'one'\?$"):
        sections.plain("strategies.on")
    with pytest.raises(UserError, match=r"^comparison: a timing has to time all runs"):
        Sections(ROOT / "params.yaml", ["train.link=1gbit"])("comparison", str)
