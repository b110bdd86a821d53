"""Saved models like those of training runs, with random weights."""

from pathlib import Path

import torch
from transformers import GPT2LMHeadModel

from shardlab.core.checksums import write_checked
from shardlab.core.files import sha256_of_file
from shardlab.data.sources import generate
from shardlab.data.tokenizer import train_tokenizer
from shardlab.models.presets import preset_config
from shardlab.train.evaluation import FILES, save_model


def write_saved_model(folder: Path, positions: int) -> None:
    """Write final_model/ and its checksums in metrics.json, as a run does."""
    tokenizer = train_tokenizer((document.content for document in generate(50)), 300)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer.to_json())
    torch.manual_seed(0)
    model = GPT2LMHeadModel(preset_config("tiny", tokenizer.vocabulary, positions, 0))
    final = folder / "final_model"
    save_model(model, model.state_dict(), folder / "tokenizer.json", final)
    files = {f"final_model/{name}": sha256_of_file(final / name) for name in FILES}
    write_checked(folder / "metrics.json", {"files": files})
