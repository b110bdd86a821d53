"""GPT-2 shapes by name (Radford et al. 2019, table 2, scaled down and up).

The parameter count in a name holds for GPT-2's vocabulary of 50,257 tokens; embeddings are tied.
"""

from typing import NamedTuple

from transformers import GPT2Config


class Shape(NamedTuple):
    """Layers, width and attention heads of a GPT-2."""

    layers: int
    width: int
    heads: int


PRESETS = {
    "tiny": Shape(2, 96, 4),
    "small": Shape(4, 128, 4),
    "10m": Shape(4, 176, 4),
    "18m": Shape(6, 256, 8),
    "62m": Shape(8, 576, 9),
    "90m": Shape(9, 704, 11),
    "300m": Shape(20, 1024, 16),
}


def preset_config(name: str, vocabulary: int, positions: int, end_of_text: int) -> GPT2Config:
    """Return the configuration of preset `name`."""
    return shape_config(PRESETS[name], vocabulary, positions, end_of_text)


def shape_config(shape: Shape, vocabulary: int, positions: int, end_of_text: int) -> GPT2Config:
    """Return the configuration of a GPT-2 of any shape.

    Without dropout, so that equal seeds give equal losses on any number of ranks. Weights start
    with deviation 1/sqrt(width), which keeps activations at their scale (Glorot and Bengio
    2010): GPT-2's own 0.02 leaves a narrow model at unigram statistics for long.
    """
    return GPT2Config(
        vocab_size=vocabulary,
        n_positions=positions,
        n_layer=shape.layers,
        n_embd=shape.width,
        n_head=shape.heads,
        initializer_range=shape.width**-0.5,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=end_of_text,
        eos_token_id=end_of_text,
        use_cache=False,
    )
