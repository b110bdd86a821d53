"""Trained causal language models, from a folder or the Hugging Face hub, for use without training.

No code of theirs is run, and nothing is unpickled.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from shardlab.core.errors import UserError, shorten


def refuse_no_model(source: str) -> None:
    """Check that a model's config.json can be read, which takes no time.

    Raises:
        UserError: there is none.
    """
    path = Path(source)
    if path.exists() and not (path / "config.json").is_file():
        raise UserError(f"{source}: no model: there is no {path / 'config.json'}")
    try:
        AutoConfig.from_pretrained(source, trust_remote_code=False, local_files_only=path.exists())
    except Exception as error:  # the library raises nothing narrower
        reason = shorten(str(error))
        if path.exists():
            reason += ": fetch or copy it again"
        else:
            reason = (
                f"no such folder, and it cannot be fetched from the hub ({reason[:100]}): "
                f"check the name, or fetch it elsewhere: hf download {source} --local-dir FOLDER"
            )
        raise UserError(f"{source}: no model: {reason}") from None


def load_causal(source: str, **options: Any) -> PreTrainedModel:
    """Load a model in the dtype of its files, on the GPU if there is one.

    Args:
        source: folder, or name on the hub.
        options: more of `from_pretrained`.

    Raises:
        UserError: it is no causal language model with safetensors files, or lacks weights, in
            whose place transformers takes random ones.
    """
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source,
            use_safetensors=True,
            dtype="auto",
            trust_remote_code=False,
            local_files_only=Path(source).exists(),
            output_loading_info=True,
            **options,
        )
    except Exception as error:  # the library raises nothing narrower
        raise UserError(
            f"{source}: no causal language model with safetensors files: {shorten(str(error))}"
        ) from None
    model, report = loaded
    if missing := sorted(report["missing_keys"]):
        more = f" and {len(missing) - 1} more" if missing[1:] else ""
        raise UserError(
            f"{source}: no weights for {missing[0]}{more} of a {type(model).__name__}: fetch or "
            "copy the whole model again"
        )
    placed: PreTrainedModel = model.eval().to("cuda" if torch.cuda.is_available() else "cpu")
    return placed


def positions_of(model: PreTrainedModel) -> int | None:
    """Return the tokens of the longest sequence that a model reads; None where it does not say."""
    names = ("max_position_embeddings", "max_seq_len", "max_target_positions")
    limits = [getattr(model.config.get_text_config(), name, None) for name in names]
    for name, part in model.named_modules():
        # learned positions that are counted from after the padding (RoBERTa)
        if name.endswith("position_embeddings") and isinstance(part, nn.Embedding):
            unused = 0 if part.padding_idx is None else part.padding_idx + 1
            limits.append(part.num_embeddings - unused)
    return min((limit for limit in limits if limit is not None), default=None)
