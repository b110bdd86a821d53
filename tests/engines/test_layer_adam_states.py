"""State of LayerAdam when it is copied, saved, loaded or given other parameters."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import shardlab
from shardlab.core.errors import UserError
from tests.engines.layer_adam_cases import alike, groups, parameters, train

BF16 = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_copy_trains_as_the_original_on_threads_of_its_own(copied, threads):
    given = parameters(torch.bfloat16)
    optimizer = shardlab.LayerAdam(groups(given), seed=3, threads=threads, **BF16)
    train(optimizer, given, 2)
    twins, twin = copied((given, optimizer))
    train(twin, twins, 2, 2)
    assert not alike(twins, given)
    assert alike(twins, train(optimizer, given, 2, 2))
    twin.step(layer="layer2")


def test_replaced_parameters_are_rounded_as_before():
    given, other = parameters(torch.bfloat16), parameters(torch.bfloat16)
    optimizer = shardlab.LayerAdam(parameters(torch.bfloat16))
    optimizer.param_groups[0]["params"] = other
    assert alike(train(shardlab.LayerAdam(given), given, 3), train(optimizer, other, 3))


def test_the_seed_is_loaded_with_the_state():
    given = parameters(torch.bfloat16)
    optimizer = shardlab.LayerAdam(given, seed=3, **BF16)
    train(optimizer, given, 2)
    stream = io.BytesIO()
    torch.save(optimizer.state_dict(), stream)
    stream.seek(0)
    resumed = [nn.Parameter(each.detach().clone()) for each in given]
    other = shardlab.LayerAdam(resumed, **BF16)
    other.load_state_dict(torch.load(stream, weights_only=True))
    assert alike(train(other, resumed, 2, 2), train(optimizer, given, 2, 2))


def test_settings_missing_from_a_state_are_kept():
    given = parameters()
    optimizer = shardlab.LayerAdam(groups(given), seed=5)
    optimizer.load_state_dict(torch.optim.AdamW([{"params": [p]} for p in given]).state_dict())
    assert [group["seed"] for group in optimizer.param_groups] == [5] * 4
    optimizer.step(layer="layer3")


def test_load_hooks_of_the_user_run_before_and_after_loading():
    given, found = parameters(torch.bfloat16), []
    before = shardlab.LayerAdam(given)
    train(before, given, 2)
    after = shardlab.LayerAdam(given)

    def doubled(_, state_dict):
        state = {n: dict(entry) for n, entry in state_dict["state"].items()}
        state[0]["exp_avg"] = 2 * state[0]["exp_avg"]
        return state_dict | {"state": state}

    after.register_load_state_dict_pre_hook(doubled)
    after.register_load_state_dict_post_hook(lambda own: found.append(own.state[given[0]]))
    after.load_state_dict(before.state_dict())
    assert torch.equal(after.state[given[0]]["exp_avg"], 2 * before.state[given[0]]["exp_avg"])
    assert found[0]["exp_avg"].dtype == torch.float32


def sgd(given):
    return torch.optim.SGD(given, momentum=0.9)


def adamax(given):
    return torch.optim.Adamax(given)


@pytest.mark.parametrize(
    ("make", "sizes", "message"),
    [
        (sgd, [(4, 4)], "group 0 has no betas and no eps, so it is not of Adam"),
        (adamax, [(4, 4)], "has step, exp_avg, exp_inf, but no exp_avg_sq"),
        (torch.optim.AdamW, [(4, 5)], r"shape \(4, 5\), the parameter \(4, 4\)"),
        (torch.optim.AdamW, [(4, 4), (4,)], r"groups of \[2\] parameters, the optimizer of \[1\]"),
        (lambda given: torch.optim.AdamW(given, amsgrad=True), [(4, 4)], "amsgrad"),
        (
            lambda given: torch.optim.AdamW([{"params": given, "name": "other"}]),
            [(4, 4)],
            "is the layer 'other', that of the optimizer 'layer0'",
        ),
    ],
)
def test_foreign_states_are_refused_in_one_line_and_nothing_is_loaded(make, sizes, message):
    theirs = parameters(sizes=sizes)
    other = make(theirs)
    train(other, theirs, 1)
    given = parameters(sizes=[(4, 4)])
    optimizer = shardlab.LayerAdam(groups(given))
    train(optimizer, given, 2)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(UserError, match=message) as refused:
        optimizer.load_state_dict(other.state_dict())
    assert "\n" not in str(refused.value)
    assert str(optimizer.state_dict()) == str(before)
    # nor is anything of it left behind
    optimizer.load_state_dict(before)
