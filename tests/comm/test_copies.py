"""Copies of what is attached: the model in a checkpoint or an average, as without `attach`."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import shardlab
from tests.comm.replicas import refusal
from tests.comm.wire import is_same_everywhere
from tests.comm.wrapped_models import backward, ddp, gradients_after
from tests.ranks import on_ranks


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "pickle": saved_and_loaded,
    "deepcopy": copy.deepcopy,
    "average": lambda model: AveragedModel(model).module,
}


@pytest.mark.parametrize("settings", [{}, {"gradients": "int8"}, {"sync": {"every": 4}}])
@pytest.mark.parametrize("name", COPIES)
@on_ranks(2)
def test_a_copy_of_an_attached_model_is_one_of_torch_alone(group, name, settings):
    model = ddp(group)
    shardlab.attach(model, **settings)
    backward(model, group, 0)
    exact = gradients_after(ddp(group), group, 2)
    copied = COPIES[name](model)
    assert torch.equal(gradients_after(copied, group, 2), exact)
    inner = COPIES[name](model.module)
    assert [*inner.state_dict()] == [*model.module.state_dict()]


@pytest.mark.parametrize("name", COPIES)
@on_ranks(2)
def test_a_copy_of_replicas_has_the_buffers_of_the_first_rank(group, name):
    model = DistributedDataParallel(nn.BatchNorm1d(40))
    shardlab.attach(model, sync={"every": 4})
    backward(model, group, 0)
    copied = COPIES[name](model)
    backward(copied, group, 1)
    copied.eval()(torch.ones(1, 40))  # buffers are sent before it
    assert is_same_everywhere(copied.module.running_mean, group)


@pytest.mark.fresh_ranks
@on_ranks(2)
def test_the_reducer_without_buckets_is_refused(group):
    import torch._dynamo

    torch._dynamo.config.optimize_ddp = "python_reducer"
    model = DistributedDataParallel(nn.Linear(4, 4))
    for settings in ({}, {"gradients": "int8"}):
        assert "set it to True before" in refusal(lambda s=settings: shardlab.attach(model, **s))
    torch._dynamo.config.optimize_ddp = True
    shardlab.attach(DistributedDataParallel(nn.Linear(4, 4)), "int8")
