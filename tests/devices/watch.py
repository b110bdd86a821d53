"""Reads and writes of the operators of a thread."""

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

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
        name, is_view, arguments = _kind_of(func)
        if is_view:
            return func(*args, **kwargs)
        races = self._device.races
        reads, writes = _tensors(arguments, args, kwargs)
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


class _Kind(NamedTuple):
    name: str
    is_view: bool
    arguments: list[tuple[str, bool]]
    """names, and whether they are written"""


@functools.cache  # a schema is copied out of C++ each time
def _kind_of(func: Any) -> _Kind:
    """Return what the schema of an operator says."""
    arguments = []
    for argument in func._schema.arguments:
        written = argument.alias_info is not None and argument.alias_info.is_write
        if func.namespace == "c10d":  # whose schemas do not say it
            written = "input" not in argument.name
        arguments.append((argument.name, written))
    return _Kind(str(func).rpartition(".")[0], _is_view(func), arguments)


def _is_view(func: Any) -> bool:
    schema = func._schema
    writes = any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
    aliases = any(r.alias_info is not None for r in schema.returns)
    return (aliases and not writes) or func is torch.ops.aten._unsafe_view.default


def _tensors(
    arguments: list[tuple[str, bool]], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors that an operator reads, and those that it writes."""
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    for number, (name, written) in enumerate(arguments):
        given = args[number] if number < len(args) else kwargs.get(name)
        if isinstance(given, Tensor):
            found = [given] if _is_tensor(given) else []
        elif given is None or isinstance(given, (bool, int, float, torch.dtype)):
            continue
        else:
            found = [each for each in tree_leaves(given) if _is_tensor(each)]
        (writes if written else reads).extend(found)
    return reads, writes
