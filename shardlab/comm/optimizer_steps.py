"""Hooks of torch's optimizers: at their updates, and at steps of replicas that train alone."""

from collections.abc import Callable, Iterable, Sequence
from weakref import WeakMethod

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from shardlab.comm.rare_sync import RareSync
from shardlab.core import torch_private
from shardlab.core.errors import UserError

_BY_HAND = "leave out optimizer=, and call handle.step() at the end of each iteration"


def unwrapped(optimizers: object) -> tuple[Optimizer, ...]:
    """Return one or several optimizers of torch, each once, without what Accelerate and
    Fabric wrap them in: that has no hooks of its own.

    Raises:
        UserError: something is no optimizer.
    """
    several: Iterable[object] = optimizers if isinstance(optimizers, Iterable) else (optimizers,)
    result: dict[Optimizer, None] = {}
    for optimizer in several:
        # one that has hooks, such as Lookahead, goes on after the optimizer in it has stepped
        while not torch_private.has_step_hooks(optimizer) and isinstance(
            inner := getattr(optimizer, "optimizer", None), Optimizer
        ):
            optimizer = inner
        if not isinstance(optimizer, Optimizer):
            raise UserError(
                f"attach: optimizer is {type(optimizer).__name__}: give one or several optimizers "
                "of torch, or leave it out and call handle.step()"
            )
        result[optimizer] = None
    return (*result,)


def count_steps(
    model: nn.Module, sync: RareSync, optimizers: Sequence[Optimizer]
) -> Callable[[], None]:
    """Tell `sync` of updates, and of steps where all optimizers step once in each; return a
    function that stops that.

    Without optimizers the script ends steps by `Handle.step`.

    Raises:
        UserError: a trained parameter is in none of the optimizers.
    """
    updates = on_update(sync.update_begins, sync.trained, is_before=True)
    if not optimizers:
        return updates
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    held = {id(parameter) for group in groups for parameter in group["params"]}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in held:
            raise UserError(f"attach: no optimizer holds {name}: give all optimizers of the model")
    # by name: its module takes long to import
    if any(type(optimizer).__name__ == "ZeroRedundancyOptimizer" for optimizer in optimizers):
        raise UserError(
            "attach: ZeroRedundancyOptimizer sends parameters between replicas in every step: take "
            "the optimizer that it wraps"
        )
    sync.is_counted = True
    stepped: set[int] = set()

    def count(index: int, arguments: dict[str, object]) -> None:
        if arguments.get("layer") is not None or torch_private.in_backward():
            raise UserError(f"sync: the optimizer updates a part of the model: {_BY_HAND}")
        if index in stepped:
            raise UserError(
                "sync: one of the optimizers steps more often than another, so that steps cannot "
                f"be told by them: {_BY_HAND}"
            )
        stepped.add(index)
        if len(stepped) == len(optimizers):
            stepped.clear()
            sync.end_step()

    hooks = [
        optimizer.register_step_post_hook(lambda *call, index=index: count(index, call[-1]))
        for index, optimizer in enumerate(optimizers)
    ]

    def stop() -> None:
        updates()
        for hook in hooks:
            hook.remove()

    return stop


def on_update(
    call: Callable[[Optimizer], None],
    parameters: Callable[[], Iterable[Tensor]],
    is_before: bool = False,
) -> Callable[[], None]:
    """Call a method at each update of a parameter by any optimizer; return a function that stops
    that.

    Args:
        call: method of an object that this does not keep alive; gets the optimizer.
        parameters: likewise; returns the parameters.
        is_before: call before the update, not after it.
    """
    # weak, since the registry of torch is global, and models are dropped without `detach`
    call_ref = WeakMethod(call, lambda _: handle.remove())
    parameters_ref = WeakMethod(parameters)

    def hook(optimizer: Optimizer, *_: object) -> None:
        method, current = call_ref(), parameters_ref()
        if method is None or current is None:
            return
        # torch calls the hook for every optimizer of the process
        ids = {id(parameter) for parameter in current()}
        if any(id(p) in ids for group in optimizer.param_groups for p in group["params"]):
            method(optimizer)

    register = register_optimizer_step_pre_hook if is_before else register_optimizer_step_post_hook
    handle = register(hook)
    return handle.remove
