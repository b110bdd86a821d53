"""NUMA memory policy of a thread and of the threads that it creates.

The kernel is asked directly: neither libnuma nor `numactl` has to be installed. A container may
forbid the calls, and then memory comes from the node of the CPU that touches it first.
"""

import ctypes
import platform

_SET, _GET = {
    "x86_64": (238, 239),
    "aarch64": (237, 236),
    "riscv64": (237, 236),
    "ppc64le": (261, 260),
}.get(platform.machine(), (None, None))
"""numbers of the system calls set_mempolicy and get_mempolicy"""
_PREFERRED = 1
_WORD = 64
_NODES = 1 << 12
"""more nodes than a kernel can be built for"""


def prefer_node(node: int) -> bool:
    """Prefer this NUMA node for memory of this thread (set_mempolicy(2)).

    Returns:
        Whether the kernel does so.
    """
    if _SET is None:
        return False
    nodes = (ctypes.c_ulong * (_NODES // _WORD))()
    nodes[node // _WORD] = 1 << node % _WORD
    # the kernel reads one bit less than maxnode says
    status: int = ctypes.CDLL(None).syscall(_SET, _PREFERRED, nodes, ctypes.c_ulong(_NODES + 1))
    return status == 0


def policy_nodes() -> tuple[int, ...]:
    """Return the nodes in the policy of this thread (get_mempolicy(2)); none without a policy."""
    nodes = (ctypes.c_ulong * (_NODES // _WORD))()
    none, flags = ctypes.c_void_p(), ctypes.c_ulong(0)
    size = ctypes.c_ulong(_NODES + 1)
    if _GET is None or ctypes.CDLL(None).syscall(_GET, none, nodes, size, none, flags) != 0:
        return ()
    return tuple(node for node in range(_NODES) if nodes[node // _WORD] >> node % _WORD & 1)
