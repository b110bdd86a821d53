"""Traces of ranks with a GPU, as Kineto writes them for torch 2.13 on CUDA.

Built by hand to the documented schema: `cuda_runtime` events and what they launched carry the same
`correlation`, NCCL kernels say which collective they are.
"""

import json
from itertools import count

HOST, AUTOGRAD, STREAM, NCCL_STREAM = 4711, 4712, 7, 20
_PID = 4700


class MadeTrace:
    """Events of one rank; times in microseconds."""

    def __init__(self, rank=0, launches=True):
        self.rank = self.device = rank
        self._launches = launches
        self._correlations = count(100)
        self.events = []

    def label(self, name, start, end, thread=HOST):
        return self.add("user_annotation", name, start, end, _PID, thread)

    def operator(self, name, start, end, thread=HOST):
        return self.add("cpu_op", name, start, end, _PID, thread)

    def kernel(self, start, end, launched, name="sm90_xmma_gemm_f32f32", thread=HOST):
        return self.launch("kernel", name, start, end, STREAM, launched, thread)

    def copy(self, start, end, launched, name="Memcpy HtoD (Pinned -> Device)"):
        return self.launch("gpu_memcpy", name, start, end, STREAM, launched, HOST)

    def nccl(self, start, end, launched, collective="AllGather", thread=HOST, reported=None):
        """A collective: its kernel and the ranges of its name on the host and on the device."""
        kernel = f"ncclDevKernel_{collective}(ncclDevKernelArgsStorage<4096ul>)"
        reported = reported or f"_{collective.lower()}_base"
        self.label(f"nccl:{reported}", launched - 0.5, launched + 2, thread)
        self.add("gpu_user_annotation", f"nccl:{reported}", start, end, self.device, NCCL_STREAM)
        more = {"Collective name": reported}
        return self.launch("kernel", kernel, start, end, NCCL_STREAM, launched, thread, **more)

    def launch(self, cat, name, start, end, stream, launched, thread, **more):
        number = next(self._correlations)
        self.add(cat, name, start, end, self.device, stream, correlation=number, **more)
        if self._launches:
            call = "cudaLaunchKernel" if cat == "kernel" else "cudaMemcpyAsync"
            times = launched, launched + 1
            self.add("cuda_runtime", call, *times, _PID, thread, correlation=number)
        return self

    def add(self, cat, name, start, end, pid, tid, **args):
        times = {"ts": start, "dur": end - start}
        event = {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, **times}
        self.events.append(event | {"args": {"External id": 1, **args}})
        return self

    def write(self, path):
        trace = {
            "distributedInfo": {"backend": "nccl", "rank": self.rank, "world_size": 2},
            "baseTimeNanoseconds": 1_000_000_000_000,
            "traceEvents": self.events,
        }
        path.write_text(json.dumps(trace))
        return path
