"""Construction of the engine that a strategy names."""

from pkgutil import resolve_name

import torch
import torch.distributed as dist
from torch import nn

from shardlab.comm.emulated_link import LinkThrottle
from shardlab.core.device import accelerator_of
from shardlab.core.errors import UserError
from shardlab.engines.base import Engine, EngineSetup, Fill, Optimization
from shardlab.models.units import prepare, uses_fp16
from shardlab.models.weights import WeightSource
from shardlab.strategy.document import CanonicalStrategy, Strategy
from shardlab.strategy.validation import check_fits, check_optimizer

_CPU = torch.device("cpu")


def build_engine(
    model: nn.Module,
    strategy: Strategy,
    optimization: Optimization,
    group: dist.ProcessGroup,
    seed: int = 0,
    weights: WeightSource | None = None,
    device: torch.device = _CPU,
    throttle: LinkThrottle | None = None,
) -> Engine:
    """Return an engine that trains `model` by `strategy`.

    Args:
        model: in float32; on the meta device where `weights` are given, else with the same weights
            on every rank.
        seed: of random codecs.
        weights: those that the model begins with; a rank that keeps parts of the units of a model
            never holds more than one unit whole.
        device: that computes.
        throttle: of an emulated link; interleaved engines share one.

    Raises:
        UserError: the strategy does not fit the model, the optimizer, the ranks or the device.
    """
    full = strategy.canonical()
    check_optimizer(full, optimization.optimizer)
    check_fits(full, dist.get_world_size(group))
    _check_device(full, device)
    prepare(model, full)
    fill = _filling(model, weights, device)
    setup = EngineSetup(
        strategy=full,
        optimization=optimization,
        group=group,
        seed=seed,
        device=device,
        fill=fill,
    )
    engine: Engine = resolve_name(full.traits.factory)(model, setup)
    engine.ledger.traffic.throttle = throttle
    return engine


def _check_device(strategy: CanonicalStrategy, device: torch.device) -> None:
    """Refuse settings that the device rules out."""
    if strategy.offload and device.type == "cpu":
        raise UserError("offload: shards are in CPU memory already: remove it")
    if strategy.activations == "memory" and accelerator_of(device) is None:
        raise UserError("activations: memory: on a CPU they are there already: use disk")
    if strategy.gradients.error_feedback and uses_fp16(strategy, device):
        raise UserError(
            "error_feedback keeps what was not sent in units of the loss scale, and param_dtype: "
            "auto is fp16 on this device: set param_dtype: fp32"
        )


def _filling(model: nn.Module, weights: WeightSource | None, device: torch.device) -> Fill:
    # wrapping changes the names
    names = {module: name for name, module in model.named_modules()}

    def fill(module: nn.Module) -> None:
        if weights is not None:
            weights.materialize(module, names[module])
        if device.type != "cpu":
            module.to(device)

    return fill
