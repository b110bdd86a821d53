"""Units and settings of blocks: wrapping, overrides, checkpointing."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2LMHeadModel

from shardlab.core.errors import UserError
from shardlab.models.build import shape_config
from shardlab.models.settings import Shape
from shardlab.models.units import plan_units, prepare, unit_sizes
from shardlab.strategy.document import parse_strategy

CPU = torch.device("cpu")
LAYERS = 5


@pytest.fixture(scope="module")
def model():
    return GPT2LMHeadModel(shape_config(Shape(LAYERS, 8, 2), 32, 16, 0))


def units_of(model, document):
    """The names of the modules of each unit."""
    names = {module: name for name, module in model.named_modules()}
    plans = plan_units(model, parse_strategy(document).canonical(), CPU)
    return [[names[module] for module in plan.modules] for plan in plans]


def blocks(*numbers):
    return [f"transformer.h.{number}" for number in numbers]


@pytest.mark.parametrize(
    "document, expected",
    [
        ({}, [blocks(n) for n in range(LAYERS)]),
        ({"wrap_size": 2}, [blocks(0, 1), blocks(2, 3), blocks(4)]),
        ({"wrap": "size", "wrap_size": 1}, [blocks(n) for n in range(LAYERS)]),
        ({"wrap": "size", "wrap_size": 10**9}, [blocks(*range(LAYERS))]),
        ({"wrap": "root"}, []),
    ],
)
def test_blocks_are_cut_into_units_in_their_order(model, document, expected):
    assert units_of(model, document) == expected


@pytest.mark.parametrize("module", ["embedding", "head"])
def test_an_embedding_that_is_also_the_head_is_one_unit_with_it(model, module):
    first, *rest = units_of(model, {"overrides": [{"module": module}]})
    assert first == ["transformer.wte", "lm_head"]
    assert rest == units_of(model, {})


def test_embedding_and_head_of_their_own_come_first_and_last():
    config = shape_config(Shape(2, 8, 2), 32, 16, 0)
    config.tie_word_embeddings = False
    both = {"overrides": [{"module": "head"}, {"module": "embedding"}]}
    assert units_of(GPT2LMHeadModel(config), both) == [
        ["transformer.wte"],
        *(blocks(0), blocks(1)),
        ["lm_head"],
    ]


def test_a_layer_has_the_settings_of_the_last_override_that_names_it(model):
    document = {
        "overrides": [
            {"layers": "1-3", "reshard_after_forward": False, "param_dtype": "bf16"},
            {"layers": 2, "reshard_after_forward": True},
        ]
    }
    plans = plan_units(model, parse_strategy(document).canonical(), CPU)
    assert [plan.reshard_after_forward for plan in plans] == [True, False, True, False, True]
    narrow = [plan.param_dtype is torch.bfloat16 for plan in plans]
    assert narrow == [False, True, True, True, False]


@pytest.mark.parametrize(
    "document, message",
    [
        (
            {"overrides": [{"layers": "4-6", "reshard_after_forward": False}]},
            "overrides: layer 5: the model has 5 blocks, the last is 4",
        ),
        (
            {"wrap_size": 2, "overrides": [{"layers": 2, "reshard_after_forward": False}]},
            "overrides: layers 2 to 3 are one unit by wrap_size: give them the same settings",
        ),
    ],
)
def test_what_does_not_fit_the_model_is_refused(model, document, message):
    with pytest.raises(UserError) as refusal:
        units_of(model, document)
    assert str(refusal.value) == message


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"wrap_size": 2},
        {"wrap": "root"},
        {"engine": "manual", "overrides": [{"module": "embedding"}]},
        {"engine": "ddp", "bucket_mb": 0.001},
    ],
)
def test_sizes_of_units_are_those_of_the_model(model, document):
    sizes = unit_sizes(model, parse_strategy(document).canonical(), CPU)
    assert sum(size.elements for size in sizes) == sum(p.numel() for p in model.parameters())
    assert len({size.name for size in sizes}) == len(sizes)


TOKENS = torch.arange(32).view(2, 16)


def gradients_and_flops(document):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(shape_config(Shape(3, 16, 2), 32, 16, 0))
    names = [name for name, _ in model.named_parameters()]
    prepare(model, parse_strategy(document).canonical())
    assert [name for name, _ in model.named_parameters()] == names
    with FlopCounterMode(display=False) as counter:
        model(input_ids=TOKENS).logits.square().mean().backward()
    return [p.grad for p in model.parameters()], counter


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_gradients_are_the_same(mode):
    expected, _ = gradients_and_flops({})
    found, _ = gradients_and_flops({"activation_checkpointing": mode})
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_full_computes_blocks_again_and_selective_none_of_their_products():
    none, full, selective = (
        gradients_and_flops({"activation_checkpointing": mode})[1].get_total_flops()
        for mode in ("none", "full", "selective")
    )
    assert selective == none < full


def test_layers_may_differ():
    all_but_one = {
        "activation_checkpointing": "full",
        "overrides": [{"layers": 1, "activation_checkpointing": "none"}],
    }
    none, some, full = (
        gradients_and_flops(document)[1].get_total_flops()
        for document in ({}, all_but_one, {"activation_checkpointing": "full"})
    )
    assert 3 * (some - none) == 2 * (full - none) > 0
