"""Conversation with a causal language model of a folder, at a prompt line."""

import sys
import unicodedata
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    TextStreamer,
    set_seed,
)
from transformers.utils import logging

from shardlab.core.document import Document
from shardlab.core.errors import UserError
from shardlab.core.progress import say

_UNBOUNDED = 1 << 20
"""positions of a model that does not say how many it has"""


class Sampling(Document):
    """Choice of the next token."""

    temperature: Annotated[float, Field(ge=0, le=100)] = 0.8
    """0: the likeliest token"""
    top_p: Annotated[float, Field(gt=0, le=1)] = 0.95
    """the likeliest tokens with this probability together"""
    tokens: Annotated[int, Field(ge=1, le=10**6)] = 200
    """longest answer; at most half of the model's positions"""
    seed: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """None: another one for each conversation"""


class _Streamer(TextStreamer):
    """Streamer that collects the answer and passes its pieces on."""

    def __init__(self, tokenizer: Any, show: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._show = show
        self.text = ""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.text += text
        self._show(text)


class Conversation:
    """History of prompts and answers; code of the folder is not run, and nothing is unpickled.

    A model whose tokenizer has a chat template reads the turns in it. Any other one continues the
    text of all turns. The oldest turns are left out where the model's positions end.

    Args:
        folder: `final_model` of a run, or any folder of a Hugging Face model.

    Raises:
        UserError: the folder holds no such model.
    """

    def __init__(self, folder: Path, sampling: Sampling) -> None:
        self._tokenizer, self._model = _load(folder)
        self._messages: list[dict[str, str]] = []
        config = self._model.config.get_text_config()
        positions = getattr(config, "max_position_embeddings", None) or _UNBOUNDED
        new = max(1, min(sampling.tokens, positions // 2))
        self._longest_prompt = positions - new
        end = self._model.generation_config.eos_token_id
        drawn = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
        # the folder's own settings may penalise or force tokens
        self._generation = GenerationConfig(
            do_sample=sampling.temperature > 0,
            max_new_tokens=new,
            eos_token_id=end,
            pad_token_id=end[0] if isinstance(end, list) else end,
            use_cache=True,
            **(drawn if sampling.temperature > 0 else {}),
        )
        if sampling.seed is not None:
            set_seed(sampling.seed)

    @torch.inference_mode()
    def answer(self, text: str, show: Callable[[str], None]) -> None:
        """Show an answer in pieces, and add it to the history, as far as Ctrl-C lets it come.

        Raises:
            UserError: it failed, for lack of memory or by the folder's chat template; the history
                is without it.
        """
        streamer = _Streamer(self._tokenizer, show)
        self._messages.append({"role": "user", "content": text})
        try:
            prompt = self._prompt()
            self._model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                generation_config=self._generation,
                streamer=streamer,
            )
        except Exception as error:  # of the libraries, or of the folder's chat template
            self._messages.pop()
            why = f"{type(error).__name__}: {_line(error)}"
            raise UserError(f"no answer: {why}; fewer --tokens need less memory") from None
        except KeyboardInterrupt:
            self._messages.append({"role": "assistant", "content": streamer.text})
            raise
        self._messages.append({"role": "assistant", "content": streamer.text})

    def _prompt(self) -> Tensor:
        """Return the tokens of the history, shape `[1, tokens]`."""
        ids = self._encode()
        while ids.shape[1] > self._longest_prompt and len(self._messages) > 1:
            del self._messages[:2]
            ids = self._encode()
        return ids[:, -self._longest_prompt :].to(self._model.device)

    def _encode(self) -> Tensor:
        if self._tokenizer.chat_template:
            ids: Tensor = self._tokenizer.apply_chat_template(
                self._messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )["input_ids"]
            return ids
        *before, last = self._messages
        ends = {"user": "", "assistant": "\n"}
        whole = "".join(turn["content"] + ends[turn["role"]] for turn in before) + last["content"]
        # what looks like a special token is text, as in training
        ids = self._tokenizer(whole, return_tensors="pt", split_special_tokens=True)["input_ids"]
        if not ids.shape[1]:  # a document begins after the end of another
            return torch.tensor([[self._generation.pad_token_id or 0]])
        return ids


def _load(folder: Path) -> tuple[Any, Any]:
    """Return tokenizer and model, on the GPU if there is one."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    options: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder}: no model: there is no {folder / 'config.json'}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
        model = AutoModelForCausalLM.from_pretrained(
            folder, use_safetensors=True, dtype="auto", **options
        )
    except Exception as error:  # the library raises nothing narrower
        raise UserError(
            f"{folder}: no causal language model with tokenizer and safetensors files: "
            f"{_line(error)}"
        ) from None
    return tokenizer, model.eval().to("cuda" if torch.cuda.is_available() else "cpu")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


_TEXT = "\n\t\u200c\u200d"
"""of the categories below: characters of text, and joiners, which scripts and emoji need"""
_ESCAPED = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""controls, formats such as the direction of text, half surrogates, separators"""


def printable(text: str) -> str:
    """Return a model's text with everything escaped that could control or crash a terminal."""
    shown = "".join(
        char.encode("unicode_escape").decode()
        if unicodedata.category(char) in _ESCAPED and char not in _TEXT
        else char
        for char in text
    )
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return shown.encode(encoding, "backslashreplace").decode(encoding)


def print_answer(conversation: Conversation, text: str) -> None:
    """Print the pieces of an answer as they come, and end the line."""
    try:
        conversation.answer(text, lambda piece: print(printable(piece), end="", flush=True))
    finally:
        print(flush=True)


def converse(conversation: Conversation) -> None:
    """Answer each line of stdin until it ends.

    An answer that fails is one line. Ctrl-C ends an answer, or at the prompt the conversation.
    """
    with suppress(ImportError):
        import readline  # noqa: F401 - editing and earlier lines at the prompt
    mark = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(mark)
        except (EOFError, KeyboardInterrupt):
            if mark:
                print()
            return
        # a byte that is no text would be half a surrogate
        text = line.encode("utf-8", "replace").decode()
        if text.strip():
            try:
                print_answer(conversation, text)
            except KeyboardInterrupt:
                continue
            except UserError as error:
                say(f"chat: error: {error}")
