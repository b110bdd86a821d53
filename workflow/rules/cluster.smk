"""Resources of jobs whose ranks are tasks, by the names that executor plugins know."""

import shlex


def default_resource(name, otherwise):
    """A value of `default-resources` in the profile."""
    values = workflow.resource_settings.default_resources or {}
    return getattr(values[name], "raw", values[name]) if name in values else otherwise


# jobs run on machines of the partition, whichever starts Snakemake
if _partition := default_resource("slurm_partition", None):
    CODE["machine"] = f"partition {_partition}"


def whole_number(name, least):
    """A whole number of `default-resources`; 1 where it is absent."""
    value = default_resource(name, 1)
    if not isinstance(value, int) or value < least:
        raise SystemExit(f"{name}: expected a whole number from {least} on (found {value!r})")
    return value


# profiles/slurm describes both
RANK_NODES = whole_number("rank_nodes", 1)
RANK_GPUS = whole_number("rank_gpus", 0)


def most_ranks(wildcards):
    """The part of a timing with the most ranks: all parts run on its cores, on one machine."""
    timing = config["timings"][wildcards.timing]
    return max([timing, *timing["interleaved"].values()], key=lambda part: part["world_size"])


def raced_in(plan):
    """Ranks and link of the races of a round."""
    return {name: plan["agent"][name] or config["train"][name] for name in ("world_size", "link")}


def raced(wildcards):
    return raced_in(config["rounds"][wildcards.round])


def tuned(wildcards):
    """The ranks of a method. Its runs follow each other in one command, so that they stay on one
    node, as those on a link do; losses do not depend on it."""
    method = config["methods"][wildcards.method]
    return {"world_size": method["world_size"] or config["train"]["world_size"], "link": "any"}


def calibrated(wildcards):
    """The ranks of train on several nodes; on one those of each timing that the forecast is fitted on."""
    train = config["train"]
    if nodes_of(train) > 1:
        return train
    return {
        "world_size": max(config["calibration"]["world_sizes"]),
        "link": None,
    }


def threads_of(job):
    """CPU threads of all ranks."""
    return job["world_size"] * config["train"]["threads"]


def nodes_of(job):
    """Number of nodes for the ranks of a job; those on an emulated link stay on one."""
    return 1 if job["link"] else min(job["world_size"], RANK_NODES)


def check_nodes(name, job):
    """Refuse ranks that nodes cannot share equally."""
    if job["world_size"] % nodes_of(job):
        raise SystemExit(
            f"{name}: {job['world_size']} ranks on {nodes_of(job)} nodes: give each node equally many, "
            "see rank_nodes"
        )


check_nodes("train", config["train"])
for _name, _timing in config["timings"].items():
    check_nodes(f"timings.{_name}", _timing)
    _parts = [_timing, *_timing["interleaved"].values()]
    if len(_parts) > 1 and max(map(nodes_of, _parts)) > 1:
        raise SystemExit(
            f"timings.{_name}.interleaved: timings take turns on one machine, and rank_nodes is "
            f"{RANK_NODES}: move what is there to timings"
        )
for _number, _round in config["rounds"].items():
    check_nodes(f"rounds.{_number}", raced_in(_round))


def placed(job_of):
    """Nodes, tasks, CPUs and GPUs of a job.

    On one node a command forks the ranks: one task has the CPUs and GPUs of all of them. On several
    nodes srun starts a task for each rank.

    Args:
        job_of: wildcards → mapping with `world_size` and `link`.
    """
    threads = config["train"]["threads"]

    def resource(alone, spread):
        """A resource on one node, and on several, of the ranks on each node."""

        def value(wildcards):
            job = job_of(wildcards)
            nodes = nodes_of(job)
            here = job["world_size"] // nodes
            return alone(here) if nodes == 1 else spread(nodes, here)

        return value

    def start(nodes, here):
        gres = f" --gres=gpu:{here * RANK_GPUS}" if RANK_GPUS else ""
        return (
            f"srun --nodes={nodes} --ntasks={nodes * here} --ntasks-per-node={here} "
            f"--cpus-per-task={threads} --distribution=block --kill-on-bad-exit=1{gres}"
        )

    none = lambda here: None
    return {
        "nodes": resource(lambda here: 1, lambda nodes, here: nodes),
        # SLURM may spread --gpus unevenly over nodes, but not --gres
        "gpu": resource(lambda here: here * RANK_GPUS, lambda nodes, here: None),
        "gres": resource(
            none, lambda nodes, here: f"gpu:{here * RANK_GPUS}" if RANK_GPUS else None
        ),
        # the plugin wants one of these, and no single task per node
        "tasks": resource(none, lambda nodes, here: nodes if here == 1 else None),
        "tasks_per_node": resource(none, lambda nodes, here: here if here > 1 else None),
        "tasks_per_gpu": resource(none, lambda nodes, here: 0),
        "cpus_per_task": resource(lambda here: here * threads, lambda nodes, here: threads),
        "mpi": resource(none, lambda nodes, here: "srun"),
        # what the command of the rule begins with
        "start": resource(lambda here: "", start),
    }


def placed_steps(job_of):
    """As `placed`, for a command that is outside of the job steps that it starts."""
    resources = placed(job_of)
    start = resources.pop("start")

    def option(wildcards):
        return f" --start {shlex.quote(start(wildcards))}" if start(wildcards) else ""

    return {**resources, "steps": option}
