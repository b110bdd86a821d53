"""Program that answers prompts by a Hugging Face or GGUF model on this machine, greedily.

`python -m shardlab.search.generate MODEL PARENT` reads one list of chat messages per line
and writes one object per line: `answer` or `error`. It ends with its input and with the process
PARENT.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from shardlab.core.process import die_with_parent

_ANSWER_TOKENS = 400
_LONGEST_ERROR = 200


class Generator:
    """A model with its tokenizer; code of its folder is not run, and nothing is unpickled.

    Args:
        path: folder, or GGUF file.
    """

    def __init__(self, path: Path) -> None:
        folder = path
        options: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
        if path.is_file():
            folder, options["gguf_file"] = path.parent, path.name
        self._tokenizer = AutoTokenizer.from_pretrained(folder, **options)
        self._model = AutoModelForCausalLM.from_pretrained(
            folder, use_safetensors=True, dtype="auto", **options
        ).eval()
        # the folder's own settings may draw samples
        self._greedy = GenerationConfig(
            do_sample=False,
            max_new_tokens=_ANSWER_TOKENS,
            eos_token_id=self._model.generation_config.eos_token_id,
            pad_token_id=self._tokenizer.pad_token_id or self._tokenizer.eos_token_id,
        )

    @torch.inference_mode()
    def answer(self, messages: list[dict[str, str]]) -> str:
        """Return the text of an answer of at most 400 tokens.

        Raises:
            ValueError: the prompt is too long for the model.
        """
        prompt: Any = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        tokens = prompt["input_ids"].shape[1]
        config = self._model.config.get_text_config()
        longest = getattr(config, "max_position_embeddings", None)
        if longest is not None and tokens + _ANSWER_TOKENS > longest:
            raise ValueError(
                f"a prompt of {tokens} tokens and {_ANSWER_TOKENS} of an answer are more than its "
                f"{longest} positions"
            )
        output = self._model.generate(**prompt, generation_config=self._greedy)
        return str(self._tokenizer.decode(output[0, tokens:], skip_special_tokens=True))


def main(model: str, parent: str) -> None:
    """Answer each line of stdin."""
    die_with_parent(int(parent))
    # libraries that print must not print into the answers
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def reply(value: dict[str, Any]) -> None:
        print(json.dumps(value), file=replies, flush=True)

    generator = None
    for line in sys.stdin:
        try:
            generator = generator or Generator(Path(model))
            reply({"answer": generator.answer(json.loads(line))})
        except Exception as error:  # a folder may be wrong in any way
            reply({"error": " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST_ERROR]})


if __name__ == "__main__":
    main(*sys.argv[1:])
