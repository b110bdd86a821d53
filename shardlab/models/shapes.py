"""Closed forms of decoders of known types: parameters, operations and units, without the model.

They are read from a preset, a name in `PUBLISHED`, or a config.json of transformers, and need
neither torch nor transformers. Tests compare them with the models of transformers.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shardlab.core.errors import UserError
from shardlab.core.files import read_json
from shardlab.data.settings import Tokenize
from shardlab.models.block_shape import BlockShape
from shardlab.models.memory import Sizes, UnitShape
from shardlab.models.settings import GPT2_VOCABULARY, PRESETS, StepSize
from shardlab.results.result import UnitSize
from shardlab.strategy.document import CanonicalStrategy


def vocabulary_of(options: Tokenize) -> int | None:
    """Return the size of the vocabulary; None where a file of a tokenizer says it."""
    return GPT2_VOCABULARY if options.tokenizer == "gpt2" else options.vocabulary


def gpt2_config(layers: int, width: int, heads: int, **others: Any) -> dict[str, Any]:
    """Return the config.json of a GPT-2, as far as sizes depend on it."""
    shape = {"n_layer": layers, "n_embd": width, "n_head": heads}
    sizes = {"vocab_size": GPT2_VOCABULARY, "n_positions": 1024}
    return {"model_type": "gpt2", **shape, **sizes, **others}


def _llama_config(
    kind: str, layers: int, width: int, heads: int, keys: int, inner: int, vocabulary: int
) -> dict[str, Any]:
    heads_of = {"num_attention_heads": heads, "num_key_value_heads": keys}
    sizes = {"hidden_size": width, "intermediate_size": inner, "vocab_size": vocabulary}
    return {"model_type": kind, "num_hidden_layers": layers, **heads_of, **sizes}


PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "gpt2": gpt2_config(12, 768, 12),
    "gpt2-medium": gpt2_config(24, 1024, 16),
    "gpt2-large": gpt2_config(36, 1280, 20),
    "gpt2-xl": gpt2_config(48, 1600, 25),
    "llama-2-7b": _llama_config("llama", 32, 4096, 32, 32, 11008, 32000),
    "llama-2-13b": _llama_config("llama", 40, 5120, 40, 40, 13824, 32000),
    "llama-2-70b": _llama_config("llama", 80, 8192, 64, 8, 28672, 32000),
    "llama-3-8b": _llama_config("llama", 32, 4096, 32, 8, 14336, 128256),
    "llama-3-70b": _llama_config("llama", 80, 8192, 64, 8, 28672, 128256),
    "mistral-7b": _llama_config("mistral", 32, 4096, 32, 8, 14336, 32000),
    "qwen2.5-7b": _llama_config("qwen2", 28, 3584, 28, 4, 18944, 152064),
    "qwen3-8b": _llama_config("qwen3", 36, 4096, 32, 8, 12288, 151936) | {"head_dim": 128},
}
"""what the config.json of public models say of their sizes"""

_VARIANTS = ("add_cross_attention", "quantization_config")
"""keys of a config.json by which a model of a known type has other parameters"""
_TENSORS = {
    **dict.fromkeys(("relu", "sigmoid", "tanh", "linear"), -1),
    **{"gelu_10": 1, "quick_gelu": 1, "gelu_python": 2, "gelu_fast": 6},
    **dict.fromkeys(("gelu_new", "gelu_accurate", "gelu_python_tanh", "xielu"), 3),
}
"""tensors that backward needs of activation functions of transformers (activations.py), over their
input and their result: most of these functions are made of elementary operations"""
_MOST_LAYERS = 10_000


def activation_tensors(function: str | None) -> int:
    """Return the tensors of the feed-forward width that backward needs of an activation function,
    over its input and its result."""
    return _TENSORS.get(str(function), 0)


class Decoder(NamedTuple):
    """Sizes of a decoder; elements of its parameters in the order of the model's own."""

    sizes: Sizes
    """without what depends on a strategy"""
    embeddings: tuple[int, ...]
    """of tokens, then of learned positions"""
    block: tuple[int, ...]
    ends: tuple[int, ...]
    """of the last normalisation, then of a head with a weight of its own"""
    tied: bool
    """whether the head has the weight of the embedding"""

    @property
    def positions(self) -> int | None:
        """Longest sequence, where positions are learned."""
        return self.embeddings[1] // self.sizes.width if len(self.embeddings) > 1 else None

    @property
    def parameters(self) -> int:
        """Number of all elements; a shared weight counts once."""
        return sum((*self.embeddings, *self.ends)) + self.layers * sum(self.block)

    @property
    def layers(self) -> int:
        """Number of blocks."""
        return len(self.sizes.blocks)

    def flops_per_token(self, sequence_length: int) -> float:
        """Return the FLOPs of forward and backward, as `shardlab.train.utilization` counts them."""
        looked_up = sum(self.embeddings[self.tied :])
        attention = sum(block.products(sequence_length) for block in self.sizes.blocks)
        return float(6 * (self.parameters - looked_up + attention))


def read_decoder(
    source: str, vocabulary: int = GPT2_VOCABULARY, positions: int = 1024
) -> Decoder | None:
    """Return the decoder of a preset, a published model, a config.json or the folder that has it.

    Args:
        vocabulary, positions: of presets.

    Returns:
        None where only transformers knows the model: a name on the hub, or another type or variant.

    Raises:
        UserError: the file is damaged, or lacks a size.
    """
    if source in PRESETS:
        own = {"vocab_size": vocabulary, "n_positions": positions}
        return decoder_of(gpt2_config(*PRESETS[source], **own), source)
    if source in PUBLISHED:
        return decoder_of(PUBLISHED[source], source)
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    if path.is_dir() or not path.exists():
        return None
    config = read_json(path, "name the config.json of a model")
    if not isinstance(config, dict):
        raise UserError(f"{path}: holds no mapping: name the config.json of a model")
    return decoder_of(config, str(path))


def decoder_of(config: Mapping[str, Any], where: str) -> Decoder | None:
    """Return the decoder of a config.json that was read, or None for one without closed form.

    Raises:
        UserError: it lacks a size.
    """

    def size(key: str, default: int | None = None) -> int:
        value = default if config.get(key) is None else config[key]
        if type(value) is not int or value < 1:
            raise UserError(f"{where}: {key} must be a whole number above 0 (found {value!r})")
        return value

    make = {"gpt2": _gpt2, **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _llama)}
    kind = str(config.get("model_type"))
    for key in ("n_layer", "n_layers", "num_layers", "num_hidden_layers"):
        layers = config.get(key)
        if type(layers) is int and layers > _MOST_LAYERS:
            raise UserError(f"{where}: {key} must be at most {_MOST_LAYERS} (found {layers})")
    if kind not in make or any(config.get(key) for key in _VARIANTS):
        return None
    if kind == "mistral" and config.get("layer_types"):
        return None  # transformers takes it for the type `ministral`
    return make[kind](config, size)


SizeOf = Callable[..., int]
"""value of a key, or its default"""


def _gpt2(config: Mapping[str, Any], size: SizeOf) -> Decoder:
    width, vocabulary = size("n_embd"), size("vocab_size")
    inner, tied = size("n_inner", 4 * width), config.get("tie_word_embeddings", True)
    attention = *_linear(width, 3 * width), *_linear(width, width)
    products = *_linear(width, inner), *_linear(inner, width)
    activation = config.get("activation_function", "gelu_new")
    block = _block(width, width, inner, inner, activation, 4 * width)
    return _decoder(
        _sizes(width, (block,) * size("n_layer"), vocabulary),
        embeddings=(vocabulary * width, size("n_positions") * width),
        block=(width, width, *attention, width, width, *products),
        norm=(width, width),
        tied=tied,
    )


def _llama(config: Mapping[str, Any], size: SizeOf) -> Decoder:
    kind, width, heads = config["model_type"], size("hidden_size"), size("num_attention_heads")
    inner, vocabulary = size("intermediate_size"), size("vocab_size")
    head = size("head_dim", 128 if kind == "qwen3" else max(width // heads, 1))
    queries = heads * head
    # other types have a number of their own where the key is absent
    keys = size("num_key_value_heads", heads if kind == "llama" else None) * head
    bias = {"qwen2": True, "mistral": False}.get(kind, config.get("attention_bias", False))
    inner_bias = kind == "llama" and config.get("mlp_bias", False)
    attention = [
        *_linear(width, queries, bias),
        *_linear(width, keys, bias) * 2,
        *_linear(queries, width, bias and kind != "qwen2"),
        *(head, head) * (kind == "qwen3"),  # normalisations of queries and keys
    ]
    products = [*_linear(width, inner, inner_bias) * 2, *_linear(inner, width, inner_bias)]
    normalised = 6 * width + (3 * (queries + keys) if kind == "qwen3" else 0)
    one = _block(queries, keys, inner, 2 * inner, config.get("hidden_act", "silu"), normalised)
    layers = range(size("num_hidden_layers"))
    blocks = tuple(one._replace(window=_window(config, size, layer)) for layer in layers)
    return _decoder(
        _sizes(width, blocks, vocabulary),
        embeddings=(vocabulary * width,),
        block=(*attention, *products, width, width),
        norm=(width,),
        tied=config.get("tie_word_embeddings", False),
    )


def _linear(inputs: int, outputs: int, bias: bool = True) -> list[int]:
    return [inputs * outputs, outputs] if bias else [inputs * outputs]


def _window(config: Mapping[str, Any], size: SizeOf, layer: int) -> int | None:
    """Return how many tokens a query sees, by the defaults of each type; None: all."""
    kind, types = config["model_type"], config.get("layer_types")
    if kind == "llama" or config.get("sliding_window", 0) is None:
        return None
    sliding = kind == "mistral"
    if not sliding and config.get("use_sliding_window", False):
        by_number = layer >= size("max_window_layers", 28)
        sliding = "sliding_attention" in types[layer : layer + 1] if types else by_number
    return size("sliding_window", 4096) if sliding else None


def _block(
    queries: int, keys: int, inner: int, expanded: int, function: str, normalised: int
) -> BlockShape:
    wide = 2 * expanded + activation_tensors(function) * inner
    return BlockShape(queries, queries, keys, keys, None, 0, inner, expanded, wide, normalised)


def _sizes(width: int, blocks: tuple[BlockShape, ...], vocabulary: int) -> Sizes:
    return Sizes(0, 0, (), 4, (), width, blocks, vocabulary)


def _decoder(
    sizes: Sizes,
    embeddings: tuple[int, ...],
    block: tuple[int, ...],
    norm: tuple[int, ...],
    tied: bool,
) -> Decoder:
    ends = norm if tied else (*norm, embeddings[0])
    one = Decoder(sizes, embeddings, block, ends, bool(tied))
    return one._replace(sizes=sizes._replace(parameters=one.parameters, trained=one.parameters))


class DecoderShapes:
    """Reader of a decoder, as `shardlab.models.sizes.ModelShapes` is of any model; of strategies
    whose units are single blocks.
    """

    def __init__(self, decoder: Decoder, step: StepSize) -> None:
        self._decoder, self._step = decoder, step

    def sizes(self, strategy: CanonicalStrategy) -> Sizes:
        """Return the sizes that memory depends on."""
        one, step = self._decoder, self._step
        accumulation = strategy.accumulation or step.accumulation
        samples = step.samples // accumulation
        element_bytes = 2 if strategy.param_dtype in ("bf16", "fp16") else 4
        kept, elements = not strategy.reshard_after_forward, sum(one.block)
        unit = UnitShape(elements, elements, kept, element_bytes)
        return one.sizes._replace(
            units=() if strategy.wrap is None else (unit,) * one.layers,
            element_bytes=element_bytes,
            checkpointing=(strategy.activation_checkpointing,) * one.layers,
            tokens=samples * step.sequence_length,
            sequence_length=step.sequence_length,
            accumulation=accumulation,
            holding=step.clip is not None or strategy.param_dtype == "fp16",
        )

    def units(self, strategy: CanonicalStrategy) -> list[UnitSize]:
        """Return what the strategy gathers or reduces together, in order of use."""
        one = self._decoder
        elements = [sum((*one.embeddings, *one.ends)), *[sum(one.block)] * one.layers]
        if strategy.bucket_mb is not None and strategy.sync is None:
            parameters = [*one.embeddings, *one.block * one.layers, *one.ends]
            elements = _buckets(parameters[::-1], int(strategy.bucket_mb * 2**20))
        return [UnitSize(name=str(number), elements=n) for number, n in enumerate(elements)]


def _buckets(parameters: Sequence[int], limit: int) -> list[int]:
    """Return the elements of each bucket, which is full when it has the limit of bytes
    (torch/csrc/distributed/c10d/reducer.cpp, `compute_bucket_assignment_by_size`)."""
    buckets = [0]
    for elements in parameters:
        if 4 * buckets[-1] >= limit:
            buckets.append(0)
        buckets[-1] += elements
    return buckets
