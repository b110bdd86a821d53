"""Weights of a model, read from the files of a Hugging Face checkpoint."""

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.utils.hub import cached_file

from shardlab.core.errors import UserError
from shardlab.models.random_weights import RandomWeights
from shardlab.models.weights import WeightSource

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_SCALE = re.compile(r"scale|scb$|absmax|quant|qzeros|zero_point", re.IGNORECASE)
"""names of what quantized weights are multiplied with"""
_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")


class _Stored(NamedTuple):
    """Tensors of a checkpoint that one tensor of the model is converted from."""

    target: str
    """the first of the tensors that result"""
    converter: WeightConverter | None
    """None where one tensor becomes one"""
    tensors: list[tuple[str, str]]
    """names in the checkpoint, by the pattern of the converter that they match"""


class CheckpointWeights(WeightSource):
    """Weights from the safetensors files of a folder, or of a name on the Hugging Face hub.

    Names and shapes are fitted to the model by the rules of its family, as `from_pretrained` does
    (transformers/core_model_loading.py). Buffers that no checkpoint holds are computed by the
    family's own initialisation. Nothing is unpickled.

    Raises:
        UserError: there are no such files, they are damaged, or a parameter is in none of them.
    """

    def __init__(self, source: str, model: PreTrainedModel) -> None:
        super().__init__(model)
        self._source = source
        self._computed = RandomWeights(model, seed=0)
        self._shapes = {
            n: tuple(t.shape) for n, t in model.named_parameters(remove_duplicate=False)
        }
        self._files = _files(source)
        self._paths: dict[str, Path | None] = {}
        self._stored = _stored(self._files, self._model)
        self._refuse_ignored()
        missing = [n for n in self._shapes if not self._places(n)]
        if missing:
            more = f" and {len(missing) - 1} more" if missing[1:] else ""
            raise UserError(
                f"model.pretrained: {source!r} has no weights for {missing[0]}{more} of a "
                f"{type(model).__name__}: give a checkpoint of the whole model"
            )

    def values(self, names: Iterable[str]) -> dict[str, Tensor]:  # noqa: D102
        names = list(names)
        read: dict[str, Tensor] = {}
        for name in names:
            for place in self._places(name):
                if place not in read:
                    read.update(self._read(self._stored[place]))
        computed = self._computed.values(name for name in names if not self._places(name))
        return {
            name: computed[name] if name in computed else self._one(name, read) for name in names
        }

    def _refuse_ignored(self) -> None:
        """Refuse tensors that the model has no place for: it would be another model.

        As in transformers, families name what may be left out.
        """
        read = {name for stored in self._stored.values() for _, name in stored.tensors}
        buffers = [r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"]
        allowed = [*(self._model._keys_to_ignore_on_load_unexpected or ()), *buffers]
        ignored = [
            name
            for name in sorted(self._files, key=dot_natural_key)
            if name not in read and not any(re.search(pattern, name) for pattern in allowed)
        ]
        if not ignored:
            return
        more = f" and {len(ignored) - 1} more" if ignored[1:] else ""
        scales = [name for name in ignored if _SCALE.search(name)]
        fix = (
            f"{scales[0]} is of a quantized model, which cannot be trained: dequantize it"
            if scales
            else "give the config.json that belongs to the weights, or remove those tensors"
        )
        raise UserError(
            f"model.pretrained: {self._source!r} holds {ignored[0]}{more}, which a "
            f"{type(self._model).__name__} of its config.json does not have: {fix}"
        )

    def _places(self, name: str) -> list[str]:
        """Return the names of a tensor under which the checkpoint stores it."""
        return [alias for alias in self._names[name] if alias in self._stored]

    def _one(self, name: str, read: dict[str, Tensor]) -> Tensor:
        """Return the value of a tensor; a checkpoint may store tied ones several times."""
        first, *others = self._places(name)
        for other in others:
            if not torch.equal(read[first], read[other]):
                raise UserError(
                    f"model.pretrained: {self._source!r} ties {first} and {other}, but holds "
                    "different values: set tie_word_embeddings in its config.json to false"
                )
        return read[first]

    def _read(self, stored: _Stored) -> dict[str, Tensor]:
        parameter = stored.target in self._shapes
        loaded = [(each, name, self._load(name, parameter)) for each, name in stored.tensors]
        values = {stored.target: loaded[0][-1]}
        if stored.converter is not None:
            converter = deepcopy(stored.converter)
            for pattern, name, tensor in loaded:
                converter.add_tensor(stored.target, name, pattern, cast(Any, tensor))
            made = converter.convert(stored.target, model=self._model, config=self._model.config)
            values = {n: t[0] if isinstance(t, list) else t for n, t in made.items()}
        for name, tensor in values.items():
            expected = self._shapes.get(name)
            if expected not in (None, tuple(tensor.shape)):
                raise UserError(
                    f"model.pretrained: {self._source!r} holds {name} of shape "
                    f"{list(tensor.shape)}, its config.json means {list(expected or ())}"
                )
        return values

    def _load(self, name: str, parameter: bool) -> Tensor:
        file = self._files[name]
        if file not in self._paths:  # looked up once, since the lookup may ask a hub
            self._paths[file] = _path(self._source, file)
        path = self._paths[file]
        if path is None:
            raise UserError(
                f"model.pretrained: {self._source!r} has no {file}, which its {_INDEX} names: "
                "fetch it again"
            )
        with _opened(path) as tensors:
            tensor: Tensor = tensors.get_tensor(name)
        # integers may be a buffer, such as a mask, but no parameter
        quantized = (parameter or tensor.is_floating_point()) and tensor.dtype not in _FLOATS
        if quantized:
            raise UserError(
                f"model.pretrained: {self._source!r} holds {name} in "
                f"{str(tensor.dtype).removeprefix('torch.')}, but quantized weights cannot be "
                "trained: dequantize them to float32, bfloat16 or float16"
            )
        # a copy, since the value read is a view of the mapped file
        return tensor.to(torch.float32 if tensor.is_floating_point() else tensor.dtype, copy=True)


def _stored(names: Iterable[str], model: PreTrainedModel) -> dict[str, _Stored]:
    """Return converters by tensor of the model, as in `convert_and_load_state_dict_in_model` of
    transformers."""
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    known, prefix = model.state_dict(), model.base_model_prefix
    stored: dict[str, _Stored] = {}
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if target not in known and name in known:
            target, pattern = rename_source_key(name, [], [], prefix, known)
        if target not in known:
            continue
        converter = None if pattern is None else by_pattern[pattern]
        made = stored.setdefault(target, _Stored(target, converter, []))
        made.tensors.append((pattern or name, name))
        if converter is not None:
            first, *others = converter.target_patterns
            stored.update({target.replace(first, other): made for other in others})
    return stored


def _files(source: str) -> dict[str, str]:
    """Return the file that stores each tensor."""
    whole = _path(source, _WHOLE)
    if whole is not None:
        with _opened(whole) as tensors:
            return dict.fromkeys(tensors.keys(), _WHOLE)
    index = _path(source, _INDEX)
    if index is not None:
        try:
            return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{index}: not an index of safetensors files: fetch it again") from None
    if any(_path(source, name) for name in _PICKLED):
        raise UserError(
            f"model.pretrained: {source!r} has its weights in {_PICKLED[0]} alone, and nothing is "
            "unpickled here: convert it to safetensors"
        )
    raise UserError(f"model.pretrained: {source!r} has neither {_WHOLE} nor {_INDEX}")


def _path(source: str, name: str) -> Path | None:
    """Return a file of a folder, or of a name on the hub (fetched when it is not cached)."""
    try:
        path = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
    except OSError as error:
        raise UserError(
            f"model.pretrained: cannot load {source!r}: {' '.join(str(error).split())}"
        ) from None
    return None if path is None else Path(path)


@contextmanager
def _opened(path: Path) -> Iterator[safe_open]:
    try:
        with safe_open(path, "pt") as tensors:
            yield tensors
    except SafetensorError as error:
        raise UserError(f"{path}: damaged ({error}): fetch it again") from None
