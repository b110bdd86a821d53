"""When a step ends: an optimizer of torch updates parameters of the model.

Error feedback has to know, so that a step without an update can be taken back as a whole, however
many messages it took. The hook that torch offers is called for every optimizer of the process.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from shardlab.comm.feedback import ErrorFeedback


def tell_steps(model: nn.Module, feedback: ErrorFeedback) -> Callable[[], None]:
    """Calls `feedback.step_ended()` after each update of `model`; returns how to stop that.

    Neither of the two is kept alive by it.
    """
    of_model = weakref.ref(model)
    of_feedback = weakref.ref(feedback)

    def updated(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        module, told = of_model(), of_feedback()
        if module is not None and told is not None and _updates(optimizer, module):
            told.step_ended()

    hook = register_optimizer_step_post_hook(updated)
    # nobody has to detach a model before throwing it away
    weakref.finalize(feedback, hook.remove)
    return hook.remove


def _updates(optimizer: torch.optim.Optimizer, model: nn.Module) -> bool:
    mine = {id(parameter) for parameter in model.parameters()}
    return any(id(p) in mine for group in optimizer.param_groups for p in group["params"])
