"""An experiment on tokens of another program, by both tools, to the end of a conversation."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.foreign_tokens import datatrove, megatron
from tests.pipeline.graphs import pending
from tests.pipeline.workspace import copy_project, run, set_params


def write(folder: Path, seed: int) -> bytes:
    draw = np.random.default_rng(seed)
    documents = [[*draw.integers(1, 300, 90), 0] for _ in range(40)]
    megatron(folder, documents[:20])
    datatrove(folder, documents[20:])
    return (folder / "text_document.bin").read_bytes()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_tokens_are_trained_on_where_they_lie(tmp_path: Path) -> None:
    root = copy_project(tmp_path / "project")
    folder = tmp_path / "tokens"
    folder.mkdir()
    written = write(folder, 0)
    set_params(
        root,
        data={"source": "tokens", "path": str(folder), "validation_share": 0.2},
        tokenize={"vocabulary": 300, "end_of_text": 0},
        inputs={"mine": str(folder)},
    )
    run(root, "dvc", "repro", "tokenize")
    kept = [path for path in (root / ".dvc/cache").rglob("*") if path.is_file()]
    assert kept and not any(written[:200] in path.read_bytes() for path in kept)

    run(root, "python", "-m", "shardlab", "train", "--run", "fsdp2", "--set", "train.steps=6")
    validate = ["python", "-m", "shardlab", "validate", "fsdp2", "--set", "train.steps=6"]
    run(root, *validate)
    found = json.loads((root / "results/validate/fsdp2/seed0.json").read_text())
    # random tokens: no model does better than their number
    assert 250 < found["val_ppl"] < 400 and found["val_tokens"] == 8 * 91 - 1
    assert found["val_bits_per_byte"] is found["not_finite"] is None
    model = "results/train/fsdp2/seed0/final_model"
    said = run(root, "python", "-m", "shardlab", "chat", model, check=False)
    assert said.returncode == 2 and "set tokenize.tokenizer" in said.stdout

    made = ["data/params.yaml", "data/corpus.json", "data/source.json", "data/statistics.json"]
    run(root, "snakemake", "--touch", "-F", "--cores", "1", *made)
    stages = {"prepare", "tokenize"}
    assert pending(root).isdisjoint(stages)
    write(folder, 1)
    assert pending(root) >= stages
    before = (root / "data/tokens/manifest.json").read_bytes()
    run(root, "snakemake", "--cores", "1", *made)
    assert (root / "data/tokens/manifest.json").read_bytes() != before
