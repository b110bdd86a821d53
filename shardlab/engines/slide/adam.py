"""Adam and AdamW on the processor, for a whole model or layer by layer."""

from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardlab.core.errors import UserError, nearest
from shardlab.kernels.adam import MOMENT_DTYPES, PARAMETER_DTYPES, Hyper, adam_
from shardlab.kernels.workers import Workers

_WORTH_THREADS = 1 << 15
"""elements; below, waking a thread costs more than it saves"""


class LayerAdam(Optimizer):
    """Adam or AdamW in one pass over each parameter, on threads of its own.

    With float32 everywhere it computes the bits of `torch.optim.AdamW(fused=True)` (the last
    n mod 16 elements of a tensor may differ in the last place). Settings, `state_dict`, learning
    rate schedulers and hooks are those of torch.optim.AdamW, whose state it loads and which loads
    its state. Moments are float32 whatever the parameters are; in bfloat16 they take half the
    memory. A second moment of bfloat16, and parameters of 16 bits, are rounded by chance, a
    function of seed, step and element: `shardlab.kernels.adam`.

    A layer is a parameter group; its name is the group's `name`, or its number:

        optimizer = LayerAdam({"name": name, "params": layer.parameters()} for name, layer in ...)
        optimizer.step(layer=name)  # as soon as its gradients are there, from any thread

    Args:
        params, lr, betas, eps, weight_decay, maximize: as of torch.optim.AdamW.
        decoupled_weight_decay: AdamW; otherwise Adam, where the decay is part of the gradient.
        exp_avg_dtype, exp_avg_sq_dtype: of the moments, float32 or bfloat16.
        seed: of the rounding by chance.
        threads: by default as many as torch uses.
        cpus: the processors that the threads are pinned to; by default all allowed ones.

    Raises:
        UserError: a setting or a parameter that it cannot take, then or when the group is added.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        amsgrad: bool = False,
        maximize: bool = False,
        decoupled_weight_decay: bool = True,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        seed: int = 0,
        threads: int | None = None,
        cpus: Iterable[int] | None = None,
    ) -> None:
        self._dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype}
        _check_moments(self._dtypes)
        self._seed = seed
        self._first_number: dict[Tensor, int] = {}
        self._count = 0
        try:
            self._workers = Workers(
                torch.get_num_threads() if threads is None else threads,
                None if cpus is None else list(cpus),
            )
        except ValueError as error:
            raise UserError(f"LayerAdam: {error}") from None
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a layer.

        Raises:
            UserError: it has a setting or a parameter that cannot be taken.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check_settings(group)
            for parameter in group["params"]:
                _check_parameter(parameter)
        except UserError:
            self.param_groups.pop()
            raise
        for parameter in group["params"]:
            self._first_number[parameter] = self._count
            self._count += _local(parameter).numel()

    @overload
    def step(self, closure: None = None, *, layer: str | int | None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float], *, layer: str | int | None = None) -> float: ...
    @torch.no_grad()
    def step(
        self, closure: Callable[[], float] | None = None, *, layer: str | int | None = None
    ) -> float | None:
        """Updates the parameters that have gradients, of all layers or of one.

        Several threads may update layers that have no parameter in common.

        Args:
            closure: computes the loss and the gradients again; its result is returned.
            layer: the name of a group, or its number.

        Raises:
            UserError: there is no such layer, or a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups if layer is None else [self._group(layer)]:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the state of a LayerAdam, or of torch.optim's Adam or AdamW.

        Moments keep the types given at construction (torch gives them those of the parameters).

        Raises:
            UserError: the state is of a variant that LayerAdam is not.
        """
        for group in state_dict["param_groups"]:
            _check_settings(self.defaults | group)
        super().load_state_dict(state_dict)
        numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            given = state_dict["state"].get(number)
            if given:
                state = self.state[parameter]
                state["step"] = torch.as_tensor(given["step"], dtype=torch.float32).cpu().clone()
                for name, dtype in self._dtypes.items():
                    state[name] = given[name].to(device="cpu", dtype=dtype, copy=True)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    def _group(self, layer: str | int) -> dict[str, Any]:
        layers = {group.get("name", i): group for i, group in enumerate(self.param_groups)}
        if layer not in layers:
            raise UserError(
                f"LayerAdam: no layer {layer!r}; {nearest(str(layer), map(str, layers))}"
            )
        return layers[layer]

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if gradient.is_sparse:
            raise UserError(
                f"LayerAdam: the gradient of a parameter {tuple(parameter.shape)} is sparse: "
                "build its nn.Embedding with sparse=False, or use torch.optim.SparseAdam"
            )
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            for name, dtype in self._dtypes.items():
                state[name] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        state["step"] += 1
        flat = _local(parameter).view(-1)
        adam_(
            flat,
            _local(state["exp_avg"]).view(-1),
            _local(state["exp_avg_sq"]).view(-1),
            [_local(gradient).contiguous().view(-1)],
            _hyper(group),
            int(state["step"]),
            scale=-1.0 if group["maximize"] else 1.0,
            seed=self._seed,
            offset=self._first_number[parameter],
            workers=self._workers if flat.numel() >= _WORTH_THREADS else None,
        )


def _hyper(group: dict[str, Any]) -> Hyper:
    beta1, beta2 = group["betas"]
    return Hyper(
        float(group["lr"]),
        (float(beta1), float(beta2)),
        group["eps"],
        group["weight_decay"],
        group["decoupled_weight_decay"],
    )


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _check_moments(dtypes: dict[str, torch.dtype]) -> None:
    for name, dtype in dtypes.items():
        if dtype == torch.float16:
            raise UserError(
                f"LayerAdam: {name}_dtype is float16, in which small gradients vanish (their "
                "squares below 6e-8) and steps grow too large: use bfloat16 or float32"
            )
        if dtype not in MOMENT_DTYPES:
            raise UserError(f"LayerAdam: {name}_dtype is {dtype}: use bfloat16 or float32")


def _check_settings(group: dict[str, Any]) -> None:
    if group["amsgrad"]:
        raise UserError("LayerAdam: amsgrad is not computed here: use torch.optim.AdamW for it")
    hyper = _hyper(group)
    low = {"lr": hyper.learning_rate, "eps": hyper.eps, "weight_decay": hyper.weight_decay}
    for name, value in low.items():
        if not value >= 0:
            raise UserError(f"LayerAdam: {name} is {value}: it must be 0 or more")
    if not all(0 <= beta < 1 for beta in hyper.betas):
        raise UserError(f"LayerAdam: betas are {hyper.betas}: each must be in [0, 1)")


def _check_parameter(parameter: Tensor) -> None:
    local = _local(parameter.detach())
    shown = f"LayerAdam: a parameter {tuple(parameter.shape)}"
    if local.dtype not in PARAMETER_DTYPES:
        raise UserError(
            f"{shown} is {local.dtype}: use float32, bfloat16 or float16, or torch.optim.AdamW"
        )
    if local.device.type != "cpu":
        raise UserError(
            f"{shown} is on {local.device}, but the update runs on the processor: keep it in "
            "host memory, or use torch.optim.AdamW(fused=True)"
        )
    if not local.is_contiguous():
        raise UserError(f"{shown} has the strides {local.stride()}: make it .contiguous()")
