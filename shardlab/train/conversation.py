"""Conversation with a causal language model of a folder, answered token by token."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    TextIteratorStreamer,
    set_seed,
)
from transformers.utils import logging

from shardlab.core.document import Document
from shardlab.core.errors import UserError

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
        self._turns: list[tuple[str, str]] = []
        config = self._model.config.get_text_config()
        positions = getattr(config, "max_position_embeddings", None) or _UNBOUNDED
        new = max(1, min(sampling.tokens, positions // 2))
        self._room = positions - new
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

    def answer(self, text: str) -> Iterator[str]:
        """Yield an answer in pieces, and add it to the history as far as it was read.

        Raises:
            UserError: it failed, for lack of memory or by the folder's chat template; the history
                is without it.
        """
        streamer = TextIteratorStreamer(self._tokenizer, skip_prompt=True, skip_special_tokens=True)
        stop, errors, said = Event(), list[str](), list[str]()
        thread = Thread(target=self._generate, args=(text, streamer, stop, errors))
        thread.start()
        try:
            for piece in streamer:
                said.append(piece)
                yield piece
        finally:  # also when Ctrl-C ends the answer
            stop.set()
            thread.join()
            if not errors:
                self._turns.append((text, "".join(said)))
        if errors:
            raise UserError(f"no answer: {errors[0]}; fewer --tokens need less memory")

    @torch.inference_mode()
    def _generate(
        self, text: str, streamer: TextIteratorStreamer, stop: Event, errors: list[str]
    ) -> None:
        def stopped(ids: Tensor, scores: Any, **_: Any) -> Tensor:
            return torch.full((len(ids),), stop.is_set(), device=ids.device)

        try:
            prompt = self._prompt(text)
            self._model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                generation_config=self._generation,
                streamer=streamer,
                stopping_criteria=[stopped],
            )
        except Exception as error:  # the main thread shows it; its frames hold memory
            errors.append(f"{type(error).__name__}: {_line(error)}")
        finally:
            streamer.end()  # or the main thread would wait for ever

    def _prompt(self, text: str) -> Tensor:
        """Return the tokens of the history and of a new text, shape `[1, tokens]`."""
        ids = self._encode(text)
        while ids.shape[1] > self._room and self._turns:
            del self._turns[0]
            ids = self._encode(text)
        return ids[:, -self._room :].to(self._model.device)

    def _encode(self, text: str) -> Tensor:
        if self._tokenizer.chat_template:
            spoken = [each for turn in self._turns for each in turn]
            roles = itertools.cycle(("user", "assistant"))
            messages = [
                {"role": role, "content": content}
                for role, content in zip(roles, [*spoken, text], strict=False)
            ]
            ids: Tensor = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )["input_ids"]
            return ids
        whole = "".join(f"{prompt}{answer}\n" for prompt, answer in self._turns) + text
        # what looks like a special token is text, as in training
        ids = self._tokenizer(whole, return_tensors="pt", split_special_tokens=True)["input_ids"]
        if not ids.shape[1]:  # a document begins after the end of another
            return torch.tensor([[self._generation.pad_token_id or 0]])
        return ids


def _load(folder: Path) -> tuple[Any, Any]:
    """Return tokenizer and model, on the GPU if there is one."""
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder}: no model: there is no {folder / 'config.json'}")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    options: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
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
