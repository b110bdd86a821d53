"""Traces of ranks with a GPU, as Kineto writes them for torch 2.13 on CUDA.

Built by hand to the documented schema: `cuda_runtime` events and what they launched carry the same
`correlation`, `ac2g` arrows join them, NCCL kernels say which collective they are.
"""

import json
from itertools import count

HOST, AUTOGRAD, STREAM, NCCL_STREAM = 4711, 4712, 7, 20
_PID = 4700
_METADATA = {"process_name": {"name": "python"}, "process_sort_index": {"sort_index": 1}}


class MadeTrace:
    """Events of one rank; times in microseconds."""

    def __init__(self, rank=0, launches=True):
        self.rank = rank
        self.device = rank
        self._launches = launches
        self._correlations = count(100)
        self.events = [
            {"ph": "M", "name": name, "ts": 0.0, "pid": pid, "tid": 0, "args": args}
            for pid in (_PID, self.device)
            for name, args in _METADATA.items()
        ]

    def label(self, name, start, end, thread=HOST):
        return self._add("user_annotation", name, start, end, _PID, thread)

    def operator(self, name, start, end, thread=HOST):
        return self._add("cpu_op", name, start, end, _PID, thread)

    def kernel(self, start, end, launched, name="sm90_xmma_gemm_f32f32", thread=HOST):
        return self._launch("kernel", name, start, end, STREAM, launched, thread)

    def copy(self, start, end, launched, name="Memcpy HtoD (Pinned -> Device)"):
        return self._launch("gpu_memcpy", name, start, end, STREAM, launched, HOST)

    def nccl(self, start, end, launched, collective="AllGather", thread=HOST, reported=None):
        """A collective: its kernel and the ranges of its name on the host and on the device."""
        kernel = f"ncclDevKernel_{collective}(ncclDevKernelArgsStorage<4096ul>)"
        reported = reported or f"_{collective.lower()}_base"
        self.label(f"nccl:{reported}", launched - 0.5, launched + 2, thread)
        self._add("gpu_user_annotation", f"nccl:{reported}", start, end, self.device, NCCL_STREAM)
        return self._launch(
            "kernel",
            kernel,
            start,
            end,
            NCCL_STREAM,
            launched,
            thread,
            {"Collective name": reported, "Group size": 2, "Process Group Ranks": "[0, 1]"},
        )

    def _launch(self, cat, name, start, end, stream, launched, thread, more=None):
        number = next(self._correlations)
        args = {"device": self.device, "context": 1, "stream": stream, "correlation": number}
        self._add(cat, name, start, end, self.device, stream, {**args, **(more or {})})
        if self._launches:
            args = {"cbid": 211, "correlation": number}
            call = "cudaLaunchKernel" if cat == "kernel" else "cudaMemcpyAsync"
            self._add("cuda_runtime", call, launched, launched + 1, _PID, thread, args)
            arrow = {"id": number, "cat": "ac2g", "name": "ac2g"}
            self.events.append({"ph": "s", "pid": _PID, "tid": thread, "ts": launched, **arrow})
            end_of_arrow = {"pid": self.device, "tid": stream, "ts": start, "bp": "e"}
            self.events.append({"ph": "f", **end_of_arrow, **arrow})
        return self

    def _add(self, cat, name, start, end, pid, tid, args=None):
        times = {"ts": start, "dur": end - start}
        event = {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, **times}
        self.events.append(event | {"args": {"External id": 1, **(args or {})}})
        return self

    def write(self, path):
        trace = {
            "schemaVersion": 1,
            "deviceProperties": [{"id": self.device, "name": "NVIDIA H100", "numSms": 132}],
            "distributedInfo": {"backend": "nccl", "rank": self.rank, "world_size": 2},
            "baseTimeNanoseconds": 1_000_000_000_000,
            "traceEvents": self.events,
            "traceName": str(path),
        }
        path.write_text(json.dumps(trace, indent=2))
        return path
