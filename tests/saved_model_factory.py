"""Saved models like those of training runs, with random weights."""

from pathlib import Path

import torch
from transformers import GPT2LMHeadModel

from shardlab.data.sources import generate
from shardlab.data.tokenizer import train_tokenizer
from shardlab.models.build import shape_config
from shardlab.models.settings import PRESETS
from shardlab.train.evaluation import save_model


def write_saved_model(folder: Path, positions: int) -> None:
    """Write final_model/, as a run does."""
    tokenizer = train_tokenizer((document.content for document in generate(50)), 300)
    tokenizer.save(folder)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(shape_config(PRESETS["tiny"], tokenizer.vocabulary, positions, 0))
    save_model(model, model.state_dict(), folder / "tokenizer.json", folder / "final_model")
