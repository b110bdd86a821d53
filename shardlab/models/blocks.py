"""Sizes of the blocks of any model: attention by its configuration, feed-forward by its modules."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from shardlab.core.errors import UserError
from shardlab.models.block_shape import BlockShape
from shardlab.models.parts import transformer_blocks
from shardlab.models.shapes import activation_tensors

_TYPES = ("layer_types", "layers_block_type", "attention_layers")
"""names of the list that says what each layer is, in any family"""
_EVERYTHING = {"full_attention", "attention", "global", "hybrid"}
_WINDOW = {"sliding_attention", "hybrid_sliding", "local"}
_CHUNK = {"chunked_attention"}
_NOTHING = {"linear_attention", "mamba", "recurrent", "conv", "moe", "mlp"}
"""layers without a query that sees other tokens"""
_INNER = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner")


def attention_of(model: PreTrainedModel) -> list[BlockShape]:
    """Return the attention in each layer of a language model; of one for several kinds of input,
    of its text.

    Raises:
        UserError: its configuration does not say how many layers there are, or how wide they are.
    """
    config = model.config.get_text_config()
    try:
        layers = _by_layer(config)
        return [_attention(of_layer, n) for n, of_layer in enumerate(layers)]
    except (AttributeError, TypeError) as error:
        raise UserError(
            f"model: {type(model).__name__} is not supported: {' '.join(str(error).split())[:150]}"
        ) from None


def block_shapes(
    model: PreTrainedModel, blocks: list[nn.Module], device: torch.device
) -> tuple[BlockShape, ...]:
    """Return the sizes of each block.

    Args:
        device: that computes; on a CPU attention that drops elements is not fused.

    Raises:
        UserError: see `attention_of`.
    """
    attention, config = attention_of(model), model.config.get_text_config()
    function = activation_tensors(_activation(config))
    last = len(attention) - 1
    # of what attention and the feed-forward network return
    dropped = 2 * config.hidden_size * any("att" not in name for name in _dropouts(config))
    shapes = []
    for n, block in enumerate(blocks):
        attends = any(_is_attention(name, part) for name, part in block.named_modules() if name)
        shape = attention[min(n, last)] if attends else BlockShape(window=0)
        networks = [*_feed_forwards(block, config.hidden_size)]
        if not networks:  # their products are spread over modules, as in BERT
            inner = _first(config, _INNER, min(n, last)) or 4 * config.hidden_size
            networks = [(inner, inner)]
        inner, expanded = (sum(sizes) for sizes in zip(*networks, strict=True))
        wide = 2 * expanded + function * inner
        shape = shape._replace(feed_forward=inner, expanded=expanded, wide=wide)
        normalised = _normalised(block, shape) + dropped
        shapes.append(shape._replace(normalised=normalised))
    # what is not fused stores its matrix: some families have no other attention
    eager = getattr(model.config, "_attn_implementation", None) == "eager"
    stored = eager or (device.type == "cpu" and any("att" in name for name in _dropouts(config)))
    return tuple(shapes if stored else (shape._replace(heads=0) for shape in shapes))


def _dropouts(config: PretrainedConfig) -> list[str]:
    """Return the names of the dropout settings of a configuration that are above 0."""
    items = vars(config).items()
    return [name for name, value in items if "drop" in name and type(value) is float and value > 0]


def _normalised(block: nn.Module, shape: BlockShape) -> int:
    """Return the elements per token that backward needs of the normalisations of a block: their
    input and result, of elementary operations also what is scaled."""
    of_heads = {"q": shape.queries, "query": shape.queries, "k": shape.keys, "key": shape.keys}
    elements = 0
    for name, part in block.named_modules():
        weight = getattr(part, "weight", None)
        if "norm" in type(part).__name__.lower() and weight is not None and weight.dim() == 1:
            word = name.rpartition(".")[2].partition("_")[0]
            size = max(weight.numel(), of_heads.get(word, 0))
            elements += size * (2 if isinstance(part, nn.LayerNorm | nn.RMSNorm) else 3)
    return elements


def unplanned(model: PreTrainedModel) -> str | None:
    """Return what about a model has no closed form; None where all has one."""
    for block in transformer_blocks(model):
        for name, value in (item for part in block.modules() for item in vars(part).items()):
            if "expert" in name and type(value) is int and value > 1:
                return f"has experts ({name}: {value}), of which each token uses some"
    config = model.config.get_text_config()
    types = _EVERYTHING | _WINDOW | _CHUNK | _NOTHING
    other = sorted({*(_types(config) or ())} - types)
    return (
        f"has layers whose queries see tokens by a rule of their own ({other[0]})"
        if other
        else None
    )


def _by_layer(config: PretrainedConfig) -> list[PretrainedConfig]:
    """Return the configuration of each layer, which may differ."""
    if getattr(config, "is_heterogeneous", False):
        return list(config.per_layer_config)
    return [config] * config.num_hidden_layers


def _types(config: PretrainedConfig) -> list[str] | None:
    return next((types for name in _TYPES if (types := getattr(config, name, None))), None)


def _attention(config: PretrainedConfig, layer: int) -> BlockShape:
    def size(*names: str) -> int:
        return _first(config, names, layer)

    heads = size("num_attention_heads")
    if not heads:
        return BlockShape(window=0)
    head, window = size("head_dim") or config.hidden_size // heads, _window(config, layer)
    value = size("v_head_dim") or head
    if size("kv_lora_rank"):  # latent attention: every head has keys and values of its own
        keys = heads * (size("qk_nope_head_dim") + size("qk_rope_head_dim"))
        return BlockShape(keys, heads * value, keys, heads * value, window, heads)
    groups = size("num_key_value_heads") or heads
    return BlockShape(heads * head, heads * value, groups * head, groups * value, window, heads)


def _window(config: PretrainedConfig, layer: int) -> int | None:
    """Return how many tokens a query of the layer sees; None: all."""
    types = _types(config)
    kind = "sliding_attention" if types is None else types[layer]
    if kind in _NOTHING:
        return 0
    if kind in _CHUNK:
        return getattr(config, "attention_chunk_size", None)
    if kind not in _WINDOW or getattr(config, "use_sliding_window", True) is False:
        return None
    return getattr(config, "sliding_window", None) or getattr(config, "window_size", None)


def _first(config: PretrainedConfig, names: Sequence[str], layer: int) -> int:
    """Return the first of some settings that a layer has; 0: none."""
    for name in names:
        value: Any = getattr(config, name, None)
        value = value[layer] if isinstance(value, list) else value
        if value:
            return int(value)
    return 0


def _is_attention(name: str, part: nn.Module) -> bool:
    return "att" in f"{name} {type(part).__name__}".lower()


def _feed_forwards(block: nn.Module, width: int) -> Iterator[tuple[int, int]]:
    """Iterate over the feed-forward networks of a block: their inner width, and the elements that
    their first products give, with a gate twice as many.

    One is the products of a module, outside of attention, from the width and back to it.
    """
    for name, part in block.named_modules():
        if name and _is_attention(name, part):
            continue
        inner = [_inner(weight, width) for weight in _products(part)]
        if len(sizes := [size for size in inner if size]) > 1:
            yield min(sizes), sum(sizes) - min(sizes)


def _products(part: nn.Module) -> Iterator[torch.Size]:
    """Iterate over the shapes of the weights with which a module multiplies."""
    for child in part.children():
        if isinstance(child, nn.Linear | Conv1D):
            yield child.weight.shape
    # of experts in one tensor
    for weight in part.parameters(recurse=False):
        if weight.dim() == 3 and min(weight.shape) > 1:
            yield weight.shape[1:]


def _inner(shape: torch.Size, width: int) -> int:
    """Return the other dimension of a weight that multiplies from the width, or to it."""
    rows, columns = shape
    return int(columns if rows == width else rows) if width in (rows, columns) else 0


def _activation(config: PretrainedConfig) -> str | None:
    names = "hidden_act", "activation_function", "hidden_activation"
    return next((value for name in names if (value := getattr(config, name, None))), None)
