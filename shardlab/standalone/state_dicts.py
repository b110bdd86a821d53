"""State dicts of a model whose parameters are elsewhere."""

from typing import Any, NoReturn

from torch import nn

from shardlab.core.errors import UserError


def refuse_state_dicts(model: nn.Module) -> None:
    """From now on nobody takes or loads what the parameters show between their uses: NaN."""
    for module in model.modules():
        module.register_state_dict_pre_hook(_refuse_to_give)
        module.register_load_state_dict_pre_hook(_refuse_to_take)


def _refuse_to_give(*_: Any) -> NoReturn:
    raise UserError(
        "state_dict: the model slides, and its parameters are in host memory: take "
        "SlideFSDP.state_dict(), on all ranks"
    )


def _refuse_to_take(*_: Any) -> NoReturn:
    raise UserError(
        "load_state_dict: the model slides, and its parameters are in host memory: load before "
        "SlideFSDP takes the model, or continue with SlideFSDP.load(folder)"
    )
