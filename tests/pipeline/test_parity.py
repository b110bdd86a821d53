"""Snakefile and dvc.yaml describe one pipeline."""

from pathlib import Path

import pytest

from tests.pipeline.conftest import copy
from tests.pipeline.graphs import Job, differences, dvc_jobs, snakemake_jobs
from tests.pipeline.workspace import ROOT, copy_project


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("parity") / "project"
    # what stages read outside; content is compared by parameters there, by files here
    outside = {"inputs": {"texts": "user_codecs", "models": "csrc"}, "model": {"config": "csrc"}}
    return copy_project(root, **outside, data={"source": "text", "path": "user_codecs"})


@pytest.fixture(scope="module")
def dvc(project: Path) -> dict[str, Job]:
    return dvc_jobs(project)


@pytest.fixture(scope="module")
def snakemake(project: Path) -> dict[str, Job]:
    return snakemake_jobs(project)


def test_both_tools_describe_one_pipeline() -> None:
    dvc, snakemake = dvc_jobs(ROOT), snakemake_jobs(ROOT)
    assert differences(dvc, snakemake) == []
    assert 50 < len(dvc) < 100, "DVC needs a second per stage from about 100 stages on"


def test_both_tools_describe_one_small_pipeline(
    dvc: dict[str, Job], snakemake: dict[str, Job]
) -> None:
    assert differences(dvc, snakemake) == []


# each makes a difference of its own, so that one reading by the tool shows them all
OF_DVC = [
    (
        "- data/corpus.json\n    - data/inputs/tokenize.json\n"
        "    - data/plans/tokenize.json\n    - data/source.json\n",
        "- data/inputs/tokenize.json\n    - data/plans/tokenize.json\n",
        "stages.tokenize: inputs",
    ),
    ("- data/code/train.json", "- data/code/timing.json", "train --run fsdp2 --seed 0: code"),
    ("    - data/inputs/train.json\n", "", "train --run fsdp2 --seed 0: read"),
    ("      - data/code/decide.json\n", "", "stages.decide 1: code"),
    ("stages.validate ${item.run}", "stages.validate --x ${item.run}", "only in dvc.yaml"),
    ("    - data/plans/train/${item.run}.json\n", "", "train --run fsdp2 --seed 0: plan"),
    ("    - data/plans/report.json\n", "    - data/plans/collect.json\n", "report: plan"),
    ("    - data/statistics.json\n    - data/tok", "    - data/tok", "tokenize: outputs"),
    ("- results/train\n    outs", "- results/profile\n    outs", "report: inputs"),
    (
        "- data/plans/propose/${key}.json\n      - data/statistics.json",
        "- data/plans/propose/${key}.json",
        "propose 1: inputs",
    ),
]
OF_RULES = [
    ("train.smk", 'plan("collect")', 'plan("estimate")', "collect: plan"),
    ("data.smk", 'READ["prepare"]', 'READ["train"]', "stages.prepare: read"),
    ("train.smk", 'plan("train/{run}")', 'plan("validate")', "train --run fsdp2 --seed 0: plan"),
    (
        "common.smk",
        '"data/tokenizer.json", *TOKENS',
        "*TOKENS",
        "train --run fsdp2 --seed 0: inputs",
    ),
    ("train.smk", '        "data/tokens/manifest.json",\n', "", "validate fsdp2 0: inputs"),
    ("report.smk", '        "results/report/tables.md",\n', "", "stages.report: outputs"),
    ("report.smk", "stages.readme", "stages.readme x", "only in Snakefile"),
    ("report.smk", 'CODE["report"]', 'CODE["readme"]', "report: code"),
]


def test_differences_in_dvc_yaml_are_reported(
    project: Path, tmp_path: Path, snakemake: dict[str, Job]
) -> None:
    root = copy(project, tmp_path / "project")
    for old, new, _ in OF_DVC:
        drift(root / "dvc.yaml", old, new)
    found = differences(dvc_jobs(root), snakemake)
    for *_, message in OF_DVC:
        assert any(message in line for line in found), message


def test_differences_in_the_rules_are_reported(
    project: Path, tmp_path: Path, dvc: dict[str, Job]
) -> None:
    root = copy(project, tmp_path / "project")
    for file, old, new, _ in OF_RULES:
        drift(root / "workflow/rules" / file, old, new)
    found = differences(dvc, snakemake_jobs(root))
    for *_, message in OF_RULES:
        assert any(message in line for line in found), message


def test_order_and_comments_are_ignored(
    project: Path, tmp_path: Path, snakemake: dict[str, Job]
) -> None:
    root = copy(project, tmp_path / "project")
    drift(
        root / "dvc.yaml",
        "    - data/corpus.json\n    - data/inputs/tokenize.json\n",
        "    - data/inputs/tokenize.json\n    # text\n    - data/corpus.json\n",
    )
    assert differences(dvc_jobs(root), snakemake) == []


def drift(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text, f"{path.name} no longer holds {old!r}"
    path.write_text(text.replace(old, new))
