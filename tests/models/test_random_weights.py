"""Random weights are those of the family, and do not depend on how they are requested."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils import swap_tensors
from transformers import AutoModelForCausalLM

from shardlab.core.errors import UserError
from shardlab.models.parts import model_parts
from shardlab.models.random_weights import RandomWeights
from tests.families import FAMILIES, config_of


def skeleton(family, **changes):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config_of(family, **changes))


def all_tensors(model):
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


@pytest.fixture(params=FAMILIES, scope="module")
def drawn(request):
    """Weights, and all of their values, requested together."""
    model = skeleton(request.param)
    weights = RandomWeights(model, seed=3)
    return request.param, weights, weights.values(all_tensors(model))


@settings(max_examples=15)
@given(data=st.data())
def test_value_does_not_depend_on_order_or_other_names(drawn, data):
    _, weights, values = drawn
    names = data.draw(st.lists(st.sampled_from(sorted(values)), min_size=1, unique=True))
    found = weights.values(names)
    assert found.keys() == set(names)
    assert all(torch.equal(found[name], values[name]) for name in names)


def test_materialized_model_has_these_values(drawn):
    family, weights, values = drawn
    model = skeleton(family)
    weights.materialize(model)
    tensors = all_tensors(model)
    assert tensors.keys() == values.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, values[name]), name
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == (
        family.endswith("-tied")
    )


def test_parameters_have_the_distribution_of_the_family(drawn):
    family, _, values = drawn
    usual = AutoModelForCausalLM.from_config(config_of(family))
    for name, parameter in usual.named_parameters(remove_duplicate=False):
        value = values[name]
        assert value.shape == parameter.shape
        if parameter.std() == 0:
            assert torch.equal(value, parameter), name
        else:
            # a standard deviation of n values is off by about 1 / sqrt(2 n)
            error = 5 * (1 / parameter.numel()) ** 0.5
            assert value.std().item() == pytest.approx(parameter.std().item(), rel=error), name
            assert abs(value.mean()) < 5 * parameter.std() / parameter.numel() ** 0.5, name
            assert not torch.equal(value, parameter), name


def test_buffers_match_those_of_from_config(drawn):
    family, _, values = drawn
    buffers = dict(AutoModelForCausalLM.from_config(config_of(family)).named_buffers())
    assert bool(buffers) == (not family.startswith("gpt2"))
    assert all(torch.equal(values[name], buffer) for name, buffer in buffers.items())


def test_modules_and_seeds_draw_different_numbers(drawn):
    family, _, values = drawn
    names = [name for name, _ in skeleton(family).named_parameters() if values[name].std() > 0]
    others = RandomWeights(skeleton(family), seed=4).values(names)
    vectors = [v[name].flatten()[:64] for v in (values, others) for name in names]
    assert all(len(vector) == 64 for vector in vectors)
    standard = torch.stack([vector / vector.norm() for vector in vectors])
    cosines = standard @ standard.T - torch.eye(len(vectors))
    assert cosines.abs().max() < 0.75


def test_random_state_of_the_caller_does_not_change():
    weights = RandomWeights(skeleton("gpt2-tied"), seed=0)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    weights.materialize(skeleton("gpt2-tied"))
    assert torch.equal(torch.rand(3), expected)


def test_allocated_tensors_are_not_changed():
    model = skeleton("llama-tied")
    weights = RandomWeights(model, seed=0)
    mine = nn.Parameter(torch.ones(model.model.norm.weight.shape) * 7)
    swap_tensors(model.model.norm.weight, mine)
    weights.materialize(model)
    assert (model.model.norm.weight == 7).all()
    before = model.lm_head.weight.detach().clone()
    with torch.no_grad():
        model.lm_head.weight.add_(1)
    weights.materialize(model)
    assert torch.equal(model.lm_head.weight, before + 1)


def test_only_requested_tensors_are_allocated():
    model = skeleton("llama-tied")
    weights, parts = RandomWeights(model, seed=0), model_parts(model)
    weights.materialize(parts.blocks[1], parts.paths[1])
    there = {name for name, tensor in all_tensors(model).items() if not tensor.is_meta}
    assert there == {name for name in all_tensors(model) if name.startswith(f"{parts.paths[1]}.")}


def test_uninitialized_parameter_is_named():
    model = skeleton("llama-tied")
    model.model.norm.forgotten = nn.Parameter(torch.empty(3, device="meta"))
    with pytest.raises(UserError, match=r"does not say how model\.norm\.forgotten begins"):
        RandomWeights(model, seed=0).materialize(model)
