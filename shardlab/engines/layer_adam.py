"""`LayerAdam`: Adam and AdamW on the CPU, for a whole model or layer by layer."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, overload

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardlab.core.errors import UserError, nearest
from shardlab.core.torch_private import local_shape_and_offset
from shardlab.kernels.adam import MOMENT_DTYPES, PARAMETER_DTYPES, Hyper, adam_
from shardlab.kernels.workers import Workers

ParamGroup = dict[str, Any]
"""an entry of `Optimizer.param_groups`"""

_WORTH_THREADS = 1 << 15
"""elements; below, waking a thread costs more than it saves"""
_OF_ALL_LAYERS = ("exp_avg_dtype", "exp_avg_sq_dtype", "threads", "cpus")


class LayerAdam(Optimizer):
    """Adam or AdamW in one pass over each parameter, on a pool of threads.

    With float32 everywhere it computes the bits of `torch.optim.AdamW(fused=True)` (the last
    n mod 16 elements of a tensor may differ in the last place). Settings, `state_dict`, learning
    rate schedulers and hooks are those of torch.optim.AdamW, whose state it loads and which loads
    its state. Moments are float32 whatever the parameters are; in bfloat16 they take half the
    memory. A second moment of bfloat16, and parameters of 16 bits, are rounded stochastically, by
    a function of seed, step and element (`shardlab.kernels.adam`), numbered in the order of
    the groups, those of a DTensor by their position in the whole; before the first step,
    parameters may be replaced by their shards.

    A layer is a parameter group; its name is the group's `name`, or its number:

        optimizer = LayerAdam({"name": name, "params": layer.parameters()} for name, layer in ...)
        optimizer.step(layer=name)  # as soon as its gradients are there, from any thread

    Args:
        params, lr, betas, eps, weight_decay, maximize: as of torch.optim.AdamW.
        decoupled_weight_decay: AdamW; otherwise Adam, where the decay is part of the gradient.
        exp_avg_dtype, exp_avg_sq_dtype: of the moments, float32 or bfloat16.
        seed: of stochastic rounding; saved with the state and loaded.
        threads: by default as many as torch uses. With one, and no `cpus`, the caller computes.
        cpus: that the threads are pinned to, in turn; by default none are.

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
        maximize: bool = False,
        decoupled_weight_decay: bool = True,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        seed: int = 0,
        threads: int | None = None,
        cpus: Iterable[int] | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "decoupled_weight_decay": decoupled_weight_decay,
            "seed": seed,
        }
        self._dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype}
        for name, dtype in self._dtypes.items():
            if dtype not in MOMENT_DTYPES:  # squares below 6e-8 would vanish in float16
                raise UserError(f"LayerAdam: {name}_dtype is {dtype}: use bfloat16 or float32")
        self._threads = torch.get_num_threads() if threads is None else threads
        self._cpus = None if cpus is None else [*cpus]
        self._start_threads()
        super().__init__(params, defaults)

    def _start_threads(self) -> None:
        """Make what copies do not share: the threads, and the numbers of elements, found later."""
        self._first_numbers: dict[Tensor, int] = {}
        self._workers: Workers | None = None
        if self._threads != 1 or self._cpus is not None:
            try:
                self._workers = Workers(self._threads, self._cpus)
            except ValueError as error:
                raise UserError(f"LayerAdam: {error}") from None

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {
            name: getattr(self, name) for name in ("_dtypes", "_threads", "_cpus")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_threads" in state:  # not from load_state_dict, which calls this too
            self._start_threads()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a layer. Parameters on the device `meta` are checked when they are updated.

        Raises:
            UserError: it has a setting or a parameter that cannot be taken.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check_settings(group)
            for parameter in group["params"]:
                if not parameter.is_meta:
                    _check_parameter(parameter)
        except UserError:
            self.param_groups.pop()
            raise

    @overload
    def step(self, closure: None = None, *, layer: str | int | None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float], *, layer: str | int | None = None) -> float: ...
    @torch.no_grad()
    def step(
        self, closure: Callable[[], float] | None = None, *, layer: str | int | None = None
    ) -> float | None:
        """Update the parameters that have gradients, of all layers or of one.

        Several threads may update layers that have no parameter in common.

        Args:
            closure: computes the loss and the gradients again; its result is returned.
            layer: the name of a group, or its number.

        Raises:
            UserError: there is no such layer, or a parameter or gradient that cannot be taken;
                nothing is updated.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self.param_groups if layer is None else [self._group(layer)]
        due = [(p, group) for group in groups for p in group["params"] if p.grad is not None]
        for parameter, _ in due:
            _check_parameter(parameter)
            if parameter.grad.layout != torch.strided:
                raise UserError(
                    f"LayerAdam: the gradient of a parameter {tuple(parameter.shape)} is sparse: "
                    "build its nn.Embedding with sparse=False, or use torch.optim.SparseAdam"
                )
        if any(_local(parameter.grad).is_pinned() for parameter, _ in due):
            # a GPU may still copy: until torch 2.13, fully_shard with CPUOffloadPolicy calls hooks
            # of gradients before, on the stream of their copies
            torch.cuda.current_stream().synchronize()
        for parameter, group in due:
            self._update(parameter, group)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of a LayerAdam, or of torch.optim's Adam or AdamW.

        Moments keep the types given at construction (torch gives them those of the parameters).
        Settings that the groups of the state lack, as torch's lack the names of layers, stay.

        Raises:
            UserError: the state is of another optimizer, or of other groups or parameters;
                nothing is loaded.
        """
        _check_state(state_dict, self.param_groups, self._dtypes)
        before = [dict(group) for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, own in zip(self.param_groups, before, strict=True):
            group.update(own | group)
        self._take_moments(state_dict)

    def _take_moments(self, loaded: dict[str, Any]) -> None:
        numbers = [n for group in loaded["param_groups"] for n in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            entry = loaded["state"].get(number)
            if entry:
                state = self.state[parameter]
                state["step"] = torch.as_tensor(entry["step"], dtype=torch.float32).cpu().clone()
                for name, dtype in self._dtypes.items():
                    moment = entry[name].to(device="cpu", dtype=dtype, copy=True)
                    state[name] = moment.contiguous()

    def _group(self, layer: str | int) -> dict[str, Any]:
        names = [group.get("name", i) for i, group in enumerate(self.param_groups)]
        if layer not in names:
            raise UserError(
                f"LayerAdam: no layer {layer!r}; {nearest(str(layer), map(str, names))}"
            )
        if names.count(layer) > 1:
            raise UserError(f"LayerAdam: {names.count(layer)} layers are called {layer!r}")
        return self.param_groups[names.index(layer)]

    def _first_number(self, parameter: Tensor) -> int:
        """Return the number of its first element, or of the first that this rank holds."""
        if parameter not in self._first_numbers:
            # no lock: threads that do this at once find the same
            numbers, count = {}, 0
            narrow = self._dtypes["exp_avg_sq"] != torch.float32
            for other in (p for group in self.param_groups for p in group["params"]):
                first, consecutive = _position(other)
                if not consecutive and (narrow or other.dtype != torch.float32):
                    raise UserError(
                        f"LayerAdam: a parameter {tuple(other.shape)} is cut across its rows, and "
                        "stochastic rounding goes by the position in the whole: shard its first "
                        "dimension, or keep it and its moments in float32"
                    )
                numbers[other] = count + first
                count += other.numel()
            self._first_numbers = numbers
        return self._first_numbers[parameter]

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32)
            for name, dtype in self._dtypes.items():
                state[name] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        state["step"] += 1
        flat = _local(parameter).view(-1)
        adam_(
            flat,
            _local(state["exp_avg"]).view(-1),
            _local(state["exp_avg_sq"]).view(-1),
            [_local(parameter.grad).contiguous().view(-1)],
            _hyper(group),
            int(state["step"]),
            scale=-1.0 if group["maximize"] else 1.0,
            seed=group["seed"],
            offset=self._first_number(parameter),
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


def _position(tensor: Tensor) -> tuple[int, bool]:
    """Return where this rank's part begins in the whole, and whether it is contiguous there."""
    if not isinstance(tensor, DTensor):
        return 0, True
    sizes, offset = local_shape_and_offset(tensor)
    first = sum(start * stride for start, stride in zip(offset, tensor.stride(), strict=True))
    cut = [dim for dim, size in enumerate(sizes) if size != tensor.shape[dim]]
    return first, not cut or all(size == 1 for size in sizes[: cut[-1]])


def _local(tensor: Tensor) -> Tensor:
    """Return the part of a DTensor that this rank holds; other tensors as they are."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _check_settings(group: ParamGroup) -> None:
    """Refuse a group whose settings are out of range, or none of a group."""
    if group.get("amsgrad"):  # of a group, or of a state of torch
        raise UserError("LayerAdam: amsgrad is not computed here: use torch.optim.AdamW for it")
    for name in _OF_ALL_LAYERS:
        if name in group:
            raise UserError(f"LayerAdam: {name} is for all layers: give it to LayerAdam itself")
    for name in ("lr", "eps", "weight_decay"):
        if not 0 <= float(group[name]) < math.inf:
            raise UserError(f"LayerAdam: {name} is {group[name]}: it must be 0 or more, and finite")
    if not all(0 <= float(beta) < 1 for beta in group["betas"]):
        raise UserError(f"LayerAdam: betas are {group['betas']}: each must be in [0, 1)")


def _check_parameter(parameter: Tensor) -> None:
    """Refuse a parameter that the kernel cannot take; a shard, on the rank that holds it."""
    part = _local(parameter.detach())
    shown = f"LayerAdam: a parameter {tuple(parameter.shape)}"
    if part.dtype not in PARAMETER_DTYPES:
        raise UserError(
            f"{shown} is {part.dtype}: use float32, bfloat16 or float16, or torch.optim.AdamW"
        )
    if part.device.type != "cpu":
        raise UserError(
            f"{shown} is on {part.device}, but the update runs on the CPU: keep it in "
            "host memory, or use torch.optim.AdamW(fused=True)"
        )
    if not part.is_contiguous():
        raise UserError(f"{shown} has the strides {part.stride()}: make it .contiguous()")


def _check_state(
    state_dict: dict[str, Any], groups: Sequence[ParamGroup], moments: Iterable[str]
) -> None:
    """Refuse the state of another kind of optimizer, or of other groups or parameters."""
    saved = state_dict["param_groups"]
    sizes, own_sizes = ([len(group["params"]) for group in some] for some in (saved, groups))
    if sizes != own_sizes:
        raise UserError(
            f"LayerAdam: the state is of groups of {sizes} parameters, the optimizer of "
            f"{own_sizes}: build it with the groups of the optimizer that was saved"
        )
    for i, (group, own) in enumerate(zip(saved, groups, strict=True)):
        name, own_name = group.get("name"), own.get("name")
        if None not in (name, own_name) and name != own_name:
            raise UserError(
                f"LayerAdam: group {i} of the state is the layer {name!r}, that of the optimizer "
                f"{own_name!r}: give the layers the names and the order that they were saved with"
            )
        _check_settings(own | group)
        for number, parameter in zip(group["params"], own["params"], strict=True):
            if entry := state_dict["state"].get(number):
                _check_entry(number, entry, parameter, moments)


def _check_entry(
    number: int, entry: dict[str, Any], parameter: Tensor, moments: Iterable[str]
) -> None:
    missing = [name for name in ("step", *moments) if name not in entry]
    if missing:
        raise UserError(
            f"LayerAdam: the state of parameter {number} has {', '.join(entry)}, but no "
            f"{' and no '.join(missing)}: load that of LayerAdam, torch.optim.AdamW or "
            "torch.optim.Adam"
        )
    for name in moments:
        shape, own = tuple(_local(entry[name]).shape), tuple(_local(parameter.detach()).shape)
        if shape != own:
            raise UserError(
                f"LayerAdam: {name} of parameter {number} has the shape {shape}, the parameter "
                f"{own}: load the state of the same model, cut for the same ranks"
            )
