"""Chrome traces with known answers, written as torch.profiler writes them."""

import json

MAIN, WORKER, WORKER_2 = 10, 11, 12


def event(name, start, end, thread=MAIN, cat="cpu_op", pid=10):
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": pid,
        "tid": thread,
        "ts": start,
        "dur": end - start,
        "args": {"External id": 1},
    }


def label(name, start, end, thread=MAIN, pid=10):
    return event(name, start, end, thread, "user_annotation", pid)


def step(number, start, end, pid=10):
    """A step whose backward pass is its second half."""
    return [
        label(f"ProfilerStep#{number}", start, end, pid=pid),
        label("shardlab::backward", (start + end) / 2, end, pid=pid),
    ]


def threads(pid=10):
    def metadata(kind, tid, **args):
        return {"ph": "M", "name": kind, "ts": 0.0, "pid": pid, "tid": tid, "args": args}

    return [
        metadata("process_name", 0, name="python"),
        metadata("process_labels", 0, labels="CPU"),
        metadata("process_sort_index", 0, sort_index=pid),
        metadata("thread_name", WORKER, name="thread 11 (python)"),
        metadata("thread_name", WORKER, name="thread 11 (pt_gloo_runloop)"),
        metadata("thread_name", WORKER_2, name="thread 12 (pt_gloo_runloop)"),
        metadata("thread_name", MAIN, name="thread 10 (python)"),
    ]


def write_rank(path, events, rank=0, base=1_000_000_000_000, pid=10):
    trace = {
        "schemaVersion": 1,
        "distributedInfo": {"backend": "gloo", "rank": rank, "world_size": 2},
        "baseTimeNanoseconds": base,
        "traceEvents": [*threads(pid), *events],
        "traceName": str(path),
    }
    path.write_text(json.dumps(trace, indent=2))
    return path
