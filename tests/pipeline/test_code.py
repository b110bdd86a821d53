"""Keys of code change with what a stage runs, and with nothing else."""

import ast
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from stages.code import STAGES
from tests.pipeline.workspace import ROOT, run

PROGRAM = """
import ast
import json
from shardlab.config.parameters import Parameters
from stages.code import code_keys
print(json.dumps(code_keys(Parameters().complete())))
"""
RUNS = """
codecs: [user_codecs.ternary]
strategies:
  mine: {engine: ddp, gradients: {codec: ternary}}
  plain: {engine: fsdp2}
  sparse: {engine: fsdp2, gradients: {codec: topk}}
  slide: {engine: slide}
seeds: [0]
baseline: plain
timings:
  all: {}
  one: {runs: [plain]}
forecast: {space: {gradients: [], weights: [], sync: []}}
rounds: {'1': {after: results/results.jsonl}}
"""
TRAINED = {"train/mine", "train/plain", "train/slide", "train/sparse"}
TIMED = {"timing/all", "timing/one"}
RANKS = {*TIMED, *TRAINED, "trial", "calibrate"}
"""what starts ranks that exchange gradients"""
ROUND = {"propose", "trial", "decide"}
KNOWING = {*ROUND, *TIMED, "calibrate", "collect", "estimate", "forecast", "report"}
"""what knows strategies, but training, which knows its own"""


def keys(root: Path) -> dict[str, Any]:
    """Keys by stage, those of single runs and timings as STAGE/NAME."""
    digests = json.loads(run(root, "python", "-c", PROGRAM).stdout)
    for stage in ("train", "tune", "timing"):
        digests |= {f"{stage}/{name}": key for name, key in digests.pop(stage).items()}
    return digests


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("code")
    for folder in ("shardlab", "stages", "csrc", "user_codecs"):
        shutil.copytree(ROOT / folder, root / folder)
    (root / "params.yaml").write_text(RUNS)
    return root


@pytest.fixture(scope="module")
def before(project: Path) -> dict[str, Any]:
    return keys(project)


FIELD = """    added: int = 1
    \"\"\"a setting\"\"\"
"""
CODEC = """

class AddedSpec(CodecSpec):
    \"\"\"A codec that no strategy names.\"\"\"

    factory = "shardlab.codecs.added:Added"

    name: Literal["added"] = "added"
"""


def appended(name: str, words: str) -> tuple[str, str, str]:
    """A field after a line of a file."""
    return name, words, words + FIELD


CHANGES: dict[str, tuple[str, str, str, set[str]]] = {
    "the body of an imported function": (
        *("shardlab/report/tables.py", "return row[", "return None or row["),
        {"report"},
    ),
    "a class of options of a new codec": (
        *(
            "shardlab/strategy/codec_options.py",
            "\n\nclass NoneSpec(",
            CODEC + "\n\nclass NoneSpec(",
        ),
        set(),
    ),
    "a docstring and a comment": (
        *("shardlab/report/tables.py", '"""', '"""Another word. '),
        set(),
    ),
    "an option of a command": ("shardlab/cli.py", "import ", "import csv, ", set()),
    "a check of several sections": (
        *("shardlab/config/experiment.py", "from typing", "import csv\nfrom typing"),
        set(),
    ),
    "a bound of parameters": ("shardlab/core/types.py", "10**9", "10**8", set()),
    "a public name": (
        "shardlab/__init__.py",
        '    "attach",',
        '    "attach",\n    "added",',
        set(),
    ),
    "a setting of the data": (
        *appended("shardlab/data/settings.py", '    """Source of the text."""\n'),
        set(),
    ),
    "a setting of the model": (
        *appended("shardlab/models/settings.py", '    Hugging Face."""\n'),
        set(),
    ),
    "a setting of training": (
        *appended("shardlab/train/settings.py", '    """Training run of every strategy."""\n'),
        set(),
    ),
    "a setting of timings": (
        *appended("shardlab/results/settings.py", '    """Number of ranks."""\n'),
        set(),
    ),
    "a setting of the search": (
        *appended("shardlab/choose/settings.py", '    """Search for a better strategy."""\n'),
        set(),
    ),
    "a setting of strategies": (
        *appended("shardlab/strategy/settings.py", 'computes a step"""\n'),
        set(),
    ),
    "a setting of compression": (
        *appended("shardlab/strategy/compression.py", 'next vector of the same unit"""\n'),
        set(),
    ),
    "an option of one codec": (
        *appended("shardlab/strategy/codec_options.py", '    name: Literal["topk"] = "topk"\n'),
        {*KNOWING - {"timing/one"}, "train/sparse"},
    ),
    "the source of the text": (
        *("shardlab/data/sources.py", "import ", "import csv, "),
        {"prepare"},
    ),
    "the tokenizer": (
        *("shardlab/data/tokenizer.py", "import ", "import csv, "),
        {"tokenize", "validate", *TRAINED, "trial"},
    ),
    "a template": ("shardlab/report/templates/report.html.j2", "<", " <", {"report"}),
    "the choice of what to race": (
        *("shardlab/choose/proposal.py", "from collections ", "import csv\nfrom collections "),
        {"propose"},
    ),
    "the model of a step": (
        *("shardlab/predict/step.py", "from collections", "import csv\nfrom collections"),
        {"forecast", "propose", "report"},
    ),
    "what a training leaves behind": (
        *("shardlab/results/train_result.py", "import json", "import csv, json"),
        {*KNOWING - {"calibrate"}, *TRAINED, "profile", "validate"},
    ),
    "a module of one engine": (
        *("shardlab/engines/slide_schedule.py", "import ", "import os, "),
        {"timing/all", "trial", "train/slide"},
    ),
    "a codec that a registry loads": (
        *("shardlab/codecs/sparse.py", "import struct", "import struct, os"),
        {"calibrate", "timing/all", "trial", "train/sparse"},
    ),
    "a codec of the user": (
        *("user_codecs/ternary.py", "import torch\n", "import torch, os\n"),
        {"calibrate", "timing/all", "trial", "train/mine"},
    ),
    "a kernel": ("csrc/integers.cpp", "\n", "\n\n", RANKS),
    "the words of errors": ("shardlab/core/errors.py", "import ", "import csv, ", {"*"}),
}


@pytest.mark.parametrize(
    "change",
    [pytest.param(name, marks=() if i < 2 else pytest.mark.long) for i, name in enumerate(CHANGES)],
)
def test_a_change_of_code_alters_the_keys_of_what_runs_it(
    project: Path, before: dict[str, Any], change: str
) -> None:
    name, old, new, expected = CHANGES[change]
    path = project / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    try:
        after = keys(project)
    finally:
        path.write_text(text)
    changed = {key for key in after if after[key] != before[key]}
    assert changed == (after.keys() - {"machine"} if expected == {"*"} else expected)


def test_the_machine_is_a_key_of_its_own(before: dict[str, Any]) -> None:
    assert {*STAGES} == before.keys() - {"machine"} - {k for k in before if "/" in k}
    assert ", torch " in before["machine"]


def test_bounds_of_parameters_compute_nothing() -> None:
    """They are in no key: what they let through is one by its value."""
    body = ast.parse((ROOT / "shardlab/core/types.py").read_text()).body
    assert {type(part) for part in body} == {ast.Expr, ast.ImportFrom, ast.Assign}
    assert all(
        isinstance(part.value, ast.Constant | ast.Subscript)
        for part in body
        if not isinstance(part, ast.ImportFrom)
    )


def test_import_of_shardlab_loads_no_module() -> None:
    """Every stage does it, so its public names are loaded on first use."""
    script = "import sys, shardlab; print([m for m in sys.modules if m.startswith('shardlab.')])"
    assert run(ROOT, "python", "-c", script).stdout == "[]\n"
