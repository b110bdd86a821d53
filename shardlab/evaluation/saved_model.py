"""Trained model as a folder in the format of transformers."""

import json
import tempfile
from pathlib import Path

from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from shardlab.core.errors import UserError

# a progress bar for one small file is noise
disable_progress_bar()

FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def save_model(
    model: PreTrainedModel, parameters: dict[str, Tensor], tokenizer: Path, folder: Path
) -> None:
    """Write `FILES` into `folder`, each by an atomic rename.

    Args:
        model: gives the architecture; its weights are not used.
        parameters: the whole model by name.
        tokenizer: the tokenizer.json that the model was trained with.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".final_model.", dir=folder.parent) as temporary:
        model.save_pretrained(temporary, state_dict=parameters)
        _save_tokenizer(tokenizer, model.config.eos_token_id, temporary)
        for name in FILES:
            Path(temporary, name).replace(folder / name)


def _save_tokenizer(path: Path, end_of_text: int, folder: str) -> None:
    text = Tokenizer.from_file(str(path)).id_to_token(end_of_text)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(path), eos_token=text, bos_token=text, unk_token=text
    )
    tokenizer.save_pretrained(folder)


def load_model(folder: Path) -> PreTrainedModel:
    """Load the saved model, on the CPU in float32.

    Raises:
        UserError: a file is absent or damaged.
    """
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise UserError(f"{folder}: {', '.join(missing)} missing: train the run again")
    try:
        json.loads((folder / "config.json").read_text())
        return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{folder}: not a model: {' '.join(str(error).split())}: train the run again"
        ) from None
