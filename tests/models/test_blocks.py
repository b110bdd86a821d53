"""Sizes of blocks of any family: products, shared weights, experts, and what backward keeps."""

import json

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from shardlab.models.blocks import attention_of, unplanned
from shardlab.models.build import build_model
from shardlab.models.memory import closed_form
from shardlab.models.settings import Model, StepSize
from shardlab.models.sizes import ModelShapes, sizes_of
from shardlab.strategy.document import parse_strategy
from shardlab.train.utilization import flops_per_token

SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
GEMMA = {**SIZES, "model_type": "gemma3_text", "sliding_window": 16}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4}
LATENT = {**SIZES, **LATENT, "v_head_dim": 6, "num_key_value_heads": 4}
EXPERTS = {"n_routed_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
ZAMBA = {"num_mem_blocks": 1, "mamba_d_state": 8, "n_mamba_heads": 8, "mamba_ngroups": 1}
ZAMBA = {**SIZES, "num_key_value_heads": 4, "num_hidden_layers": 6, **ZAMBA}
ZAMBA["layers_block_type"] = ["mamba", "hybrid"] * 3
ZAMBA = {k: v for k, v in ZAMBA.items() if k != "head_dim"} | {"model_type": "zamba2"}


def built(folder, **config):
    (folder / "config.json").write_text(json.dumps(config))
    return build_model(Model(config=str(folder)), 300, 32, 0, seed=0).module


@pytest.mark.parametrize(
    ("config", "products"),
    [
        ({**SIZES, "model_type": "mistral", "sliding_window": 8}, 2 * 32 * 3 * 8),
        ({**SIZES, "model_type": "mistral", "sliding_window": None}, 2 * 32 * 3 * 32),
        (
            {**GEMMA, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
            2 * 32 * (16 + 32 + 16),
        ),
        (
            {**SIZES, "model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv"]},
            2 * 32 * 32,
        ),
        ({**SIZES, **MAMBA, "model_type": "bamba", "attn_layer_indices": [1]}, 2 * 32 * 32),
        (
            {
                **{"model_type": "gpt_neo", "vocab_size": 300, "hidden_size": 32, "num_heads": 4},
                **{"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
                "window_size": 8,
            },
            2 * 32 * (32 + 8),
        ),
        # queries and keys of 12 elements, values of 6
        ({**LATENT, **EXPERTS, "model_type": "deepseek_v3"}, 3 * 4 * (12 + 6) * 32),
        ({**LATENT, "model_type": "minicpm3"}, 3 * 4 * (12 + 6) * 32),
        # heads of another size in layers that see everything
        (
            {
                **{**SIZES, "model_type": "gemma4_text", "sliding_window": 8},
                **{"global_head_dim": 16, "hidden_size_per_layer_input": 8},
                "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            },
            2 * 4 * (8 * 8 + 8 * 8 + 16 * 32),
        ),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_attention_counts_what_the_queries_of_each_layer_see(config, products, tmp_path):
    model = built(tmp_path, **config)
    assert sum(layer.products(32) for layer in attention_of(model)) == products
    assert flops_per_token(model, 32) - flops_per_token(model, 0) == 6 * products


def test_a_shared_weight_is_once_in_memory_and_as_often_as_used_in_flops(tmp_path):
    model = built(tmp_path, **ZAMBA)
    names = dict(model.named_parameters(remove_duplicate=False))
    used = sum(p.numel() for name, p in names.items() if "embed_tokens" not in name)
    once = sum(p.numel() for p in model.parameters())
    assert used > once
    assert flops_per_token(model, 0) == 6 * used
    shapes, strategy = (
        ModelShapes(model, StepSize(8, 64)),
        parse_strategy({"engine": "fsdp2"}).canonical(),
    )
    sizes = shapes.sizes(strategy)
    assert sizes.parameters == once
    root, *units = [unit.elements for unit in shapes.units(strategy)]
    assert (root, units) == (sizes.root, [unit.elements for unit in sizes.units])
    assert root + sum(units) == once and root > 0


DBRX = {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 300, "model_type": "dbrx"}


@pytest.mark.parametrize(
    ("config", "experts"),
    [
        (
            {
                **DBRX,
                "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4},
                "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
            },
            True,
        ),
        ({**SIZES, "model_type": "mixtral"}, True),
        ({**LATENT, **EXPERTS, "model_type": "deepseek_v3", "first_k_dense_replace": 1}, True),
        ({**SIZES, "model_type": "doge", "is_moe": True, "num_experts": 16}, True),
        ({**SIZES, "model_type": "doge", "is_moe": False}, False),
        ({**SIZES, "model_type": "llama"}, False),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else str(value),
)
def test_experts_are_where_blocks_have_them(config, experts, tmp_path):
    assert ("has experts" in (unplanned(built(tmp_path, **config)) or "")) is experts


KEPT = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4}
KEPT = {**KEPT, "num_key_value_heads": 4, "pad_token_id": 0}
GATED = {
    "llama": {},
    "llama, gelu": {"hidden_act": "gelu"},
    "llama, gelu_new": {"hidden_act": "gelu_new"},
    "starcoder2": {"hidden_act": "gelu_pytorch_tanh"},
    "gpt_neox": {},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": 512},
    "gemma3_text": {"head_dim": 16, "sliding_window": 512},
    "olmo2": {},
    "phi3": {},
    "granite": {},
    "bitnet": {},
    "lfm2": {"layer_types": ["full_attention"]},
}


def kept_bytes(model, tokens):
    """Bytes per token that autograd keeps, of the parameters and buffers apart."""
    weights = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept, alive = {}, []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and tensor.numel() > 1:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=torch.ones(1, tokens, dtype=torch.long), use_cache=False)
    return sum(kept.values()) / tokens


@pytest.mark.parametrize("family", GATED)
def test_activations_of_a_block_are_what_autograd_keeps(family):
    tokens, step = 128, StepSize(batch_size=1, sequence_length=128)
    strategy = parse_strategy({"engine": "fsdp2", "param_dtype": "bf16"}).canonical()
    real, predicted = [], []
    for layers in (2, 3):
        changes = {k: v * layers if k == "layer_types" else v for k, v in GATED[family].items()}
        kind = transformers.CONFIG_MAPPING[family.partition(",")[0]]
        config = kind(**KEPT, num_hidden_layers=layers, **changes)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        real.append(kept_bytes(model, tokens))
        sizes = sizes_of(model, strategy, step, torch.device("cpu"))
        predicted.append(closed_form(strategy, sizes, 1)["activations"] / tokens)
    ratio = (predicted[1] - predicted[0]) / (real[1] - real[0])
    # less where normalisations compute in float32
    assert 0.75 < ratio < 1.1


DROPPING = {
    "gpt2": {"n_embd": 64, "n_head": 4},
    "llama": {**KEPT, "attention_dropout": 0.1},
    "opt": {**KEPT, "ffn_dim": 256, "word_embed_proj_dim": 64, "attention_dropout": 0.1},
}


@pytest.mark.parametrize("family", DROPPING)
def test_dropout_keeps_what_it_dropped_and_on_cpus_attention_matrices(family):
    tokens, step = 128, StepSize(batch_size=1, sequence_length=128)
    strategy = parse_strategy({"engine": "fsdp2", "param_dtype": "fp32"}).canonical()
    real, predicted = [], []
    for layers in (2, 3):
        config = transformers.CONFIG_MAPPING[family](**DROPPING[family], num_hidden_layers=layers)
        model = AutoModelForCausalLM.from_config(config)
        real.append(kept_bytes(model, tokens))
        sizes = sizes_of(model, strategy, step, torch.device("cpu"))
        predicted.append(closed_form(strategy, sizes, 1)["activations"] / tokens)
    assert predicted[1] - predicted[0] == pytest.approx(real[1] - real[0], rel=0.05)


def test_selective_checkpointing_keeps_both_products_before_a_gate():
    tokens, step = 256, StepSize(batch_size=1, sequence_length=256)
    document = {"engine": "fsdp2", "param_dtype": "bf16", "activation_checkpointing": "selective"}
    strategy, kept = parse_strategy(document).canonical(), []
    for layers in (2, 3):
        config = transformers.LlamaConfig(**KEPT, num_hidden_layers=layers)
        model = AutoModelForCausalLM.from_config(config)
        sizes = sizes_of(model, strategy, step, torch.device("cpu"))
        kept.append(closed_form(strategy, sizes, 1)["activations"] / tokens / 2)
    # the input of the block and the products out of attention and network; of attention queries,
    # keys, values and its result; two products into the network
    assert kept[1] - kept[0] == 3 * 64 + 4 * 64 + 2 * 256
