"""Conversation with a causal language model of a folder, at a prompt line."""

import io
import math
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
    AutoTokenizer,
    GenerationConfig,
    LogitsProcessorList,
    PretrainedConfig,
    set_seed,
)
from transformers.generation.streamers import BaseStreamer

from shardlab.core.document import Document
from shardlab.core.errors import UserError, shorten
from shardlab.core.files import read_json
from shardlab.core.progress import say
from shardlab.data.tokenizer import NUMBERS
from shardlab.models.pretrained import load_causal, positions_of, refuse_no_model

_UNBOUNDED = 1 << 20
"""positions of a model that does not say how many it has"""
_COLD = 1e-5
"""lower temperatures give the likeliest token, and logits that overflow"""


class Sampling(Document):
    """Choice of the next token."""

    temperature: Annotated[float, Field(ge=0, le=100)] = 0.8
    """0 (or below 1e-5): the likeliest token"""
    top_p: Annotated[float, Field(gt=0, le=1)] = 0.95
    """the likeliest tokens with this probability together"""
    tokens: Annotated[int, Field(ge=1, le=10**6)] = 200
    """longest answer; at most half of the model's positions"""
    seed: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """None: another one for each conversation"""


class _Streamer(BaseStreamer):
    """Streamer that collects the answer and passes on by what the decoded whole has grown.

    Pieces that are decoded alone lose spaces at their beginning and characters of several tokens.

    Args:
        continues: the answer continues the text of the prompt, space at its beginning included.
    """

    def __init__(self, tokenizer: Any, show: Callable[[str], None], continues: bool) -> None:
        self._tokenizer, self._show, self._continues = tokenizer, show, continues
        self._ids: list[int] | None = None
        self._before = 0
        self._shown = ""
        self.text = ""

    def put(self, value: Tensor) -> None:
        """Take the prompt, then token after token."""
        if self._ids is None:
            self._ids = value.flatten().tolist() if self._continues else []
            self._before = len(self._decoded())
            return
        self._ids += value.flatten().tolist()
        self.text = self._decoded()[self._before :]
        # the last character may lack bytes, which the next token brings
        if not self.text.endswith("\ufffd"):
            self._grow()

    def end(self) -> None:
        """Pass on what is left."""
        self._grow()

    def _decoded(self) -> str:
        return str(self._tokenizer.decode(self._ids, skip_special_tokens=True))

    def _grow(self) -> None:
        self._show(self.text[len(self._shown) :])
        self._shown = self.text


def _refuse_nan(_ids: Tensor, logits: Tensor) -> Tensor:
    """Return the logits; minus infinity may mask a token, but nothing else is not finite."""
    if bool((logits.isnan() | logits.isposinf()).any()):
        raise UserError("no answer: the model's logits are not finite: are its weights?")
    return logits


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
        self._folder = folder
        self._messages: list[dict[str, str]] = []
        config = self._model.config.get_text_config()
        positions = positions_of(self._model) or _UNBOUNDED
        new = max(1, min(sampling.tokens, positions // 2))
        self._longest_prompt = positions - new
        ends = _ends(folder, config, self._tokenizer.eos_token_id)
        drawn = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
        draws = sampling.temperature >= _COLD
        self._generation = GenerationConfig(
            do_sample=draws,
            max_new_tokens=new,
            eos_token_id=ends or None,
            pad_token_id=ends[0] if ends else None,
            use_cache=True,
            **(drawn if draws else {}),
        )
        if sampling.seed is not None:
            set_seed(sampling.seed)

    def banner(self) -> str:
        """Return lines on the model, what it was trained on, how it answers, and the keys."""
        kind, size = self._model.config.model_type, self._model.num_parameters()
        facts = [f"{self._folder}: {kind}, {size:,} parameters", *_training(self._folder)]
        way = "answers in turns" if self._tokenizer.chat_template else "continues text"
        keys = "Ctrl-C ends an answer, Ctrl-D the conversation"
        return f"{printable(', '.join(facts))}\nIt {way}. {keys}."

    @torch.inference_mode()
    def answer(self, text: str, show: Callable[[str], None]) -> None:
        """Show an answer in pieces, and add it to the history, as far as Ctrl-C lets it come.

        Raises:
            UserError: it failed, for lack of memory, by the folder's chat template, or since the
                model's logits are not finite; the history is without it.
        """
        streamer = _Streamer(self._tokenizer, show, not self._tokenizer.chat_template)
        self._messages.append({"role": "user", "content": text})
        try:
            prompt = self._prompt()
            self._model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                generation_config=self._generation,
                logits_processor=LogitsProcessorList([_refuse_nan]),
                streamer=streamer,
            )
        except UserError:
            self._messages.pop()
            raise
        except Exception as error:  # of the libraries, or of the folder's chat template
            self._messages.pop()
            memory = isinstance(error, MemoryError) or "memory" in str(error)
            fix = "; fewer --tokens need less memory" if memory else ""
            why = f"{type(error).__name__}: {shorten(str(error))}"
            raise UserError(f"no answer: {why}{fix}") from None
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
            prompt: Tensor = self._tokenizer.apply_chat_template(
                self._messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )["input_ids"]
            return prompt
        *before, last = self._messages
        ends = {"user": "", "assistant": "\n"}
        whole = "".join(turn["content"] + ends[turn["role"]] for turn in before) + last["content"]
        # what looks like a special token is text, as in training
        encoded = self._tokenizer(
            whole, return_tensors="pt", split_special_tokens=True, return_special_tokens_mask=True
        )
        ids: Tensor = encoded["input_ids"]
        # the tokens that a tokenizer puts after a text would end it before the answer
        added = encoded["special_tokens_mask"][0].bool()
        ids = ids[:, : ids.shape[1] - int(added.flip(0).cumprod(0).sum())]
        if not ids.shape[1]:  # a document begins after the end of another
            return torch.tensor([[self._generation.pad_token_id or 0]])
        return ids


def _training(folder: Path) -> list[str]:
    """Return what the run of a final model says of it; nothing of another model."""
    run, found = folder.resolve().parent, []
    metrics = run / "metrics.json"
    quality = Path(run, "../../../validate", run.parent.name, f"{run.name}.json")
    if folder.resolve().name == "final_model" and metrics.is_file():
        known = read_json(metrics)
        factors = "steps", "batch_size", "accumulation", "world_size", "sequence_length"
        found.append(f"trained on {math.prod(known[key] for key in factors):,} tokens")
        ppl = read_json(quality).get("val_ppl") if quality.is_file() else None
        found += [f"validation perplexity {ppl:.1f}"] if ppl is not None else []
    return found


def _load(folder: Path) -> tuple[Any, Any]:
    """Return tokenizer and model."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder: name that of a model, such as a final_model")
    refuse_no_model(str(folder))
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # the library raises nothing narrower
        raise UserError(f"{folder}: no tokenizer that can be read: {shorten(str(error))}") from None
    if tokenizer.init_kwargs.get(NUMBERS):
        raise UserError(
            f"{folder}: trained on tokens whose tokenizer nobody named: set tokenize.tokenizer and "
            "run it again, or copy its tokenizer.json and tokenizer_config.json there"
        )
    # the folder's own would fill in what is not set: penalties, forced tokens, a time
    return tokenizer, load_causal(str(folder), generation_config=GenerationConfig())


def _ends(folder: Path, config: PretrainedConfig, of_tokenizer: int | None) -> list[int]:
    """Return the tokens that end an answer: of the generation config, or else of the model, and the
    tokenizer's, which ends a turn of a chat template."""
    settings = folder / "generation_config.json"
    saved = read_json(settings, "") if settings.is_file() else {}
    ends = saved.get("eos_token_id", getattr(config, "eos_token_id", None))
    every = [*(ends if isinstance(ends, list) else [ends]), of_tokenizer]
    return list(dict.fromkeys(end for end in every if end is not None))


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
    # a byte that is no text would be half a surrogate
    text = text.encode("utf-8", "replace").decode()
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
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # lines of a pipe may be of any encoding
    mark = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(mark)
        except (EOFError, KeyboardInterrupt):
            if mark:
                print()
            return
        if line.strip():
            try:
                print_answer(conversation, line)
            except KeyboardInterrupt:
                continue
            except UserError as error:
                say(f"chat: error: {error}")
