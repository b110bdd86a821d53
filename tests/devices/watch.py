"""Reads and writes of the operators of a thread."""

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from tests.devices.simulated_device import SimulatedDevice

_READS = {"aten._local_scalar_dense", "aten.equal", "aten.nonzero", "aten.is_pinned"}
"""operators whose result the host gets: it waits"""


class Watch(TorchDispatchMode):
    """Tells of the operators of a thread.

    Args:
        on_host: the thread launches nothing.
    """

    def __init__(self, device: "SimulatedDevice", on_host: bool = False) -> None:
        super().__init__()
        self._device, self._on_host = device, on_host

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(not issubclass(each, (Tensor, nn.Parameter)) or _wraps(each) for each in types):
            return NotImplemented  # it calls operators of the tensors inside
        kwargs = kwargs or {}
        races, name = self._device.races, str(func).rpartition(".")[0]
        reads, writes = _arguments(func, args, kwargs)
        if _is_view(func):
            return func(*args, **kwargs)
        locked = [races.is_page_locked(each) for each in (*reads, *writes)]
        if self._on_host or (locked and all(locked)):
            races.touch(name, reads, writes)
            return func(*args, **kwargs)
        stream = self._device.current.number
        if func.namespace == "c10d" and stream:
            self._device.collectives.append((name, self._device.number_of(_group(args))))
        races.launch(stream, name, reads, writes)
        if name in _READS or (name == "aten.copy_" and any(locked) and not _goes_on(args, kwargs)):
            self._device.synchronize()
        out = func(*args, **kwargs)
        races.launch(stream, name, (), [each for each in tree_leaves(out) if _is_tensor(each)])
        return out


def _wraps(kind: type) -> bool:
    return kind not in (Tensor, nn.Parameter)


def _is_tensor(each: Any) -> bool:
    return isinstance(each, Tensor) and not _wraps(type(each))


def _group(args: tuple[Any, ...]) -> str:
    """Return the name of the process group of a collective."""
    [box] = [each for each in args if isinstance(each, torch.ScriptObject) and _boxes_group(each)]
    return str(dist.ProcessGroup.unbox(box).group_name)


def _boxes_group(box: torch.ScriptObject) -> bool:
    return "ProcessGroup" in str(box._type())


def _goes_on(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the host goes on while a copy is made."""
    return bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False))


def _is_view(func: Any) -> bool:
    schema = func._schema
    writes = any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
    aliases = any(r.alias_info is not None for r in schema.returns)
    return (aliases and not writes) or func is torch.ops.aten._unsafe_view.default


def _arguments(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors that an operator reads, and those that it writes."""
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    for number, argument in enumerate(func._schema.arguments):
        given = args[number] if number < len(args) else kwargs.get(argument.name)
        written = argument.alias_info is not None and argument.alias_info.is_write
        if func.namespace == "c10d":  # whose schemas do not say it
            written = "input" not in argument.name
        (writes if written else reads).extend(filter(_is_tensor, tree_leaves(given)))
    return reads, writes
