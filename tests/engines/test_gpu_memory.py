"""Models and batches that do not fit a GPU are refused before anything is allocated on it."""

from contextlib import nullcontext

import pytest
import torch

import shardlab
from shardlab.config.schema import Train
from shardlab.core.errors import UserError
from shardlab.engines import gpu_memory
from shardlab.engines.gpu_memory import GpuMemory
from shardlab.models.memory import CUBLAS_WORKSPACE, closed_form
from shardlab.models.unit_sizes import sizes_of
from tests.engines.sliding_factory import labelled, model_of, slid
from tests.engines.test_slide_fsdp_refusals import own_model
from tests.ranks import on_ranks

GPU = torch.device("cuda", 0)


def needed(model, config, tokens, world_size=2):
    """Bytes of the memory model, as the stages compare them with what is free."""
    train = Train(batch_size=1, sequence_length=max(tokens, 2), clip=config.clip)
    sizes = sizes_of(model, config.strategy(), train, GPU)._replace(tokens=tokens)
    return sum(closed_form(config.strategy(), sizes, world_size).values()) + CUBLAS_WORKSPACE


@pytest.fixture
def free(monkeypatch):
    """A function that sets the free bytes of all GPUs."""

    def set_free(count):
        monkeypatch.setattr(gpu_memory, "free_bytes", lambda device: count)

    return set_free


@pytest.mark.parametrize("settings", [{}, {"window": 3, "activation_checkpointing": "none"}])
def test_the_limit_is_that_of_the_memory_model(free, settings):
    config, model = shardlab.SlideConfig(param_dtype="bf16", **settings), model_of("llama-untied")
    streaming, tokens = needed(model, config, 0), 4 * 4096
    free(streaming - 1)
    with pytest.raises(UserError, match=r"^SlideFSDP needs about .* GB free: set .*window=2"):
        GpuMemory(model, config, GPU, 2)
    free(streaming)
    memory = GpuMemory(model, config, GPU, 2)
    large = {"input_ids": torch.zeros(4, 4096, dtype=torch.long)}
    # streaming has taken its part, and the script has freed some
    rest = needed(model, config, tokens) - streaming
    free(rest - 1)
    with pytest.raises(UserError, match=r"^a batch of 16384 tokens .* free: give fewer") as error:
        memory.check_batch(large)
    assert "\n" not in str(error.value)
    free(rest)
    memory.check_batch(large)
    free(0)
    memory.check_batch(large)  # one like it has fitted


def test_the_models_own_checkpointing_counts(free):
    tokens, config = 4096, shardlab.SlideConfig(activation_checkpointing="none")
    model = model_of("llama-untied")
    need, batch = needed(model, config, tokens), {"input_ids": torch.zeros(1, tokens).long()}
    for own in False, True:
        if own:
            model.activation_checkpointing_enable()
        free(need - 1)
        memory = GpuMemory(model, config, GPU, 2)
        free(0)
        with nullcontext() if own else pytest.raises(UserError):
            memory.check_batch(batch)


def test_of_other_models_the_streaming_is_checked(free):
    free(CUBLAS_WORKSPACE)
    with pytest.raises(UserError, match=r"^SlideFSDP needs"):
        GpuMemory(own_model(), shardlab.SlideConfig(), GPU, 1)
    free(1 << 30)
    GpuMemory(own_model(), shardlab.SlideConfig(), GPU, 1).check_batch({"x": torch.ones(2, 4)})


@on_ranks(1)
def test_a_batch_that_is_refused_has_not_begun(free):
    sliding, config = slid(model_of("llama-untied")), shardlab.SlideConfig()
    free(CUBLAS_WORKSPACE << 10)
    memory = sliding._gpu_memory = GpuMemory(model_of("llama-untied"), config, GPU, 1)
    memory._free = memory._streaming["workspace"] = 0
    free(0)
    with pytest.raises(UserError, match="a batch of 32 tokens"):
        sliding(labelled(0, 0))
    sliding._gpu_memory = None
    losses = [float(sliding(labelled(0, 0)).loss) for _ in range(2)]
    assert losses[1] < losses[0]
