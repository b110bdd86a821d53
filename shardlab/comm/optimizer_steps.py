"""Hooks that count the steps of replicas that train alone."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from shardlab.comm.rare_sync import RareSync
from shardlab.core.errors import UserError


def unwrapped(optimizers: object) -> tuple[Optimizer, ...]:
    """Return one or several optimizers of torch, each once, without what Accelerate and Fabric wrap
    them in: that has no hooks of its own.

    Raises:
        UserError: something is no optimizer.
    """
    given: Iterable[object] = optimizers if isinstance(optimizers, Iterable) else (optimizers,)
    found: dict[Optimizer, None] = {}
    for each in given:
        while isinstance(inner := getattr(each, "optimizer", None), Optimizer):
            each = inner
        if not isinstance(each, Optimizer):
            raise UserError(
                f"attach: optimizer is {type(each).__name__}: give one or several optimizers of "
                "torch, or leave it out and call handle.step()"
            )
        found[each] = None
    return (*found,)


def count_steps(
    model: nn.Module, sync: RareSync, optimizers: Sequence[Optimizer]
) -> Callable[[], None]:
    """Call `sync.step_ended()` once all optimizers have stepped; return a function that stops that.

    Without optimizers the script does so by `Handle.step`; one that forgets it gets an error.

    Raises:
        UserError: a trained parameter is in none of the optimizers.
    """
    if not optimizers:
        return _expect_steps(model, sync)
    held = {id(p) for each in optimizers for group in each.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in held:
            raise UserError(f"attach: no optimizer holds {name}: give all optimizers of the model")
    # by name: its module takes long to import
    if any(type(each).__name__ == "ZeroRedundancyOptimizer" for each in optimizers):
        raise UserError(
            "attach: ZeroRedundancyOptimizer sends parameters between replicas in every step: take "
            "the optimizer that it wraps"
        )
    sync.is_counted = True
    # others may step in place of these
    expected = _expect_steps(model, sync)
    stepped: set[int] = set()

    def after(optimizer: Optimizer, _: object, arguments: dict[str, object]) -> None:
        if arguments.get("layer") is not None:
            raise UserError(
                "sync: step(layer=...) updates a part of the model: leave out optimizer=, and call "
                "handle.step() at the end of each iteration"
            )
        sync.training_began()
        stepped.add(id(optimizer))
        if len(stepped) == len(optimizers):
            stepped.clear()
            sync.step_ended()

    hooks = [optimizer.register_step_post_hook(after) for optimizer in optimizers]

    def stop() -> None:
        expected()
        for hook in hooks:
            hook.remove()

    return stop


def _expect_steps(model: nn.Module, sync: RareSync) -> Callable[[], None]:
    """Raise `UserError` where an optimizer steps for longer than a round and no step is counted."""
    own = {id(parameter) for parameter in model.parameters()}
    steps, seen = Counter[int](), 0
    # weak, since the registry of torch is global, and models are dropped without `detach`
    sync_ref = weakref.ref(sync)

    def after(optimizer: Optimizer, *_: object) -> None:
        nonlocal seen
        sync = sync_ref()
        if sync is None or not any(
            id(p) in own for group in optimizer.param_groups for p in group["params"]
        ):
            return
        if seen != sync.step:
            steps.clear()
            seen = sync.step
        steps[id(optimizer)] += 1
        if steps[id(optimizer)] > sync.settings.every + 8:
            raise UserError(
                "sync: the optimizer steps, but nothing counts the steps: give attach all that "
                "step as optimizer=..., or call handle.step() at the end of each iteration"
            )

    hook = register_optimizer_step_post_hook(after)
    weakref.finalize(sync, hook.remove)
    return hook.remove
