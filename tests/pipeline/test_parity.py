"""Snakefile and dvc.yaml describe one pipeline."""

from pathlib import Path

import pytest

from tests.pipeline.graphs import Job, differences, dvc_jobs, snakemake_jobs
from tests.pipeline.workspace import ROOT, copy_project


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_project(tmp_path_factory.mktemp("parity") / "project")


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


@pytest.mark.parametrize(
    "old, new, message",
    [
        (
            "- data/corpus.json\n    - data/source.json\n    - shardlab",
            "- shardlab",
            "stages.tokenize: inputs",
        ),
        ("    - shardlab/strategy\n    - shardlab/train\n", "", "stages.train"),
        ("stages.validate ${item.run}", "stages.validate --x ${item.run}", "only in dvc.yaml"),
        ("    - strategies.${item.run}\n", "", "stages.train --run fsdp2 --seed 0: parameters"),
        ("    - baseline\n", "    - train\n", "stages.report: parameters"),
        ("    - data/statistics.json\n    - data/tok", "    - data/tok", "tokenize: outputs"),
        ("- results/train\n    - shard", "- results/profile\n    - shard", "report: inputs"),
        ("      - ${item.after}\n      - results/results.jsonl\n", "", "decide 1: inputs"),
    ],
)
def test_difference_in_dvc_yaml_is_reported(
    project: Path, tmp_path: Path, snakemake: dict[str, Job], old: str, new: str, message: str
) -> None:
    root = copy_project(tmp_path / "project")
    drift(root / "dvc.yaml", old, new)
    assert any(message in line for line in differences(dvc_jobs(root), snakemake))


@pytest.mark.parametrize(
    "file, old, new, message",
    [
        ("train.smk", '"shardlab/engines",\n', "", "stages.train --run fsdp2 --seed 0: inputs"),
        (
            "train.smk",
            'values("quality", "runs", "seeds", "timings")',
            'values("runs")',
            "collect: parameters",
        ),
        ("train.smk", '        "data/tokens/manifest.json",\n', "", "validate fsdp2 0: inputs"),
        ("report.smk", '        "results/report/tables.md",\n', "", "stages.report: outputs"),
        ("report.smk", "stages.readme", "stages.readme x", "only in Snakefile"),
        (
            "common.smk",
            '"data/tokenizer.json", *TOKENS',
            "*TOKENS",
            "train --run fsdp2 --seed 0: inputs",
        ),
        ("common.smk", 'path.suffix != ".so"', 'path.suffix != ".j2"', "report: inputs"),
    ],
)
def test_difference_in_the_rules_is_reported(
    tmp_path: Path, dvc: dict[str, Job], file: str, old: str, new: str, message: str
) -> None:
    root = copy_project(tmp_path / "project")
    drift(root / "workflow/rules" / file, old, new)
    assert any(message in line for line in differences(dvc, snakemake_jobs(root)))


def test_stages_that_run_codecs_depend_on_those_of_the_user(
    dvc: dict[str, Job], snakemake: dict[str, Job]
) -> None:
    for jobs in (dvc, snakemake):
        found = {
            command.split(".")[1].split()[0]
            for command, job in jobs.items()
            if "user_codecs/ternary.py" in job.inputs
        }
        assert found == {"train", "timing", "calibrate", "estimate", "trial"}


def test_order_and_comments_are_ignored(tmp_path: Path, snakemake: dict[str, Job]) -> None:
    root = copy_project(tmp_path / "project")
    drift(
        root / "dvc.yaml",
        "    - data\n    - tokenize\n",
        "    - tokenize\n    # text\n    - data\n",
    )
    assert differences(dvc_jobs(root), snakemake) == []


def drift(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text, f"{path.name} no longer holds {old!r}"
    path.write_text(text.replace(old, new))
