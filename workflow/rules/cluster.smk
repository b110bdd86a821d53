import shlex
import subprocess
from math import ceil
from statistics import mean

from shardlab.core.files import read_json
from shardlab.core.errors import UserError
from shardlab.config.schema import each_timing

ESTIMATE = Path("results/memory.json")
COMPARISON = config["comparison"]
# Python, torch and its libraries in each rank
RANK_MB = 1000
# of what is estimated, for allocators and messages
MARGIN = 1.25
# minutes of a training run besides its steps, and of its steps for nodes that are slower or disturbed
BESIDE_STEPS, SLACK = 10, 2


# SystemExit below: Snakemake shows its own exceptions with the place in this file
def read_estimate():
    """Bytes of the largest run by the closed forms; None before the stage estimate."""
    if not ESTIMATE.exists():
        return None
    try:
        known = read_json(ESTIMATE, "repeat the stage estimate").values()
    except UserError as error:
        raise SystemExit(f"snakemake: error: {error}") from None
    return max(sum(each["closed_form"].values()) for each in known)


LARGEST_RUN = read_estimate()


def default_resource(name, otherwise):
    """A value of `default-resources` in the profile."""
    given = workflow.resource_settings.default_resources or {}
    return getattr(given[name], "raw", given[name]) if name in given else otherwise


def of_profile(name, least):
    """A whole number of `default-resources`; 1 where it is absent."""
    value = default_resource(name, 1)
    if not isinstance(value, int) or value < least:
        raise SystemExit(f"{name}: expected a whole number from {least} on (found {value!r})")
    return value


# profiles/slurm describes both
RANK_NODES = of_profile("rank_nodes", 1)
RANK_GPUS = of_profile("rank_gpus", 0)

for _name, _timing in config["timings"].items():
    if RANK_NODES > 1 and _timing.get("interleaved"):
        raise SystemExit(
            f"timings.{_name}.interleaved: timings take turns on one machine, and rank_nodes is "
            f"{RANK_NODES}: move what is there to timings"
        )


def nodes_of(ranks, link):
    """Number of nodes of some ranks; those on emulated links stay on one."""
    return 1 if link else min(ranks, RANK_NODES)


for _name, _ranks, _link in (
    ("train", config["train"]["world_size"], config["train"].get("link")),
    *(
        (f"timings.{name}", each.world_size, each.link)
        for name, each in PARAMETERS("timings").items()
    ),
    *((f"rounds.{number}", *ranks_and_link(number)) for number in config["rounds"]),
):
    if _ranks % nodes_of(_ranks, _link):
        raise SystemExit(
            f"{_name}: {_ranks} ranks on {nodes_of(_ranks, _link)} nodes: give each node equally many, "
            "see rank_nodes"
        )


def check_partition():
    """Refuse a partition that SLURM does not have; otherwise each job would be refused for itself."""
    partition = default_resource("slurm_partition", None)
    if partition is None:
        return
    sinfo = ("sinfo", "--noheader", "--format=%R")
    try:
        known = subprocess.run(sinfo, capture_output=True, text=True, check=True).stdout.split()
    except FileNotFoundError:
        raise UserError("there is no SLURM here (no command sinfo): log in where it is") from None
    except subprocess.CalledProcessError as error:
        raise UserError(f"SLURM does not answer: {error.stderr.strip().splitlines()[-1]}") from None
    if missing := set(partition.split(",")) - set(known):
        raise UserError(
            f"slurm_partition: SLURM has no partition {', '.join(missing)}: choose from "
            f"{', '.join(known)} in default-resources of the profile"
        )


def placed(ranks, link, held=None):
    """Nodes, tasks, CPUs, GPUs and memory of a job, by the names that executor plugins know.

    On one node a command forks the ranks: one task has the CPUs and GPUs of all of them. On several
    nodes srun starts a task for each rank, and the nodes have equally many. Ranks on emulated links
    stay on one node.

    Args:
        ranks, link: wildcards → number of ranks, and their emulated link, if any.
        held: wildcards → numbers of ranks of all timings or runs of the job, each with the engines
            that a rank holds, where memory.json estimates them.
    """
    threads = config["train"]["threads"]

    def size(wildcards):
        count = ranks(wildcards)
        nodes = nodes_of(count, link(wildcards))
        return nodes, count // nodes

    def spread(value):
        """A resource of jobs on several nodes alone, of the nodes and the ranks on each."""
        return lambda wildcards: value(*size(wildcards)) if size(wildcards)[0] > 1 else None

    def gpus(wildcards):
        nodes, here = size(wildcards)
        return None if nodes > 1 else here * RANK_GPUS

    def cpus(wildcards):
        nodes, here = size(wildcards)
        return threads if nodes > 1 else here * threads

    def start(nodes, here):
        gres = f" --gres=gpu:{here * RANK_GPUS}" if RANK_GPUS else ""
        return (
            f"srun --nodes={nodes} --ntasks={nodes * here} --ntasks-per-node={here} "
            f"--cpus-per-task={threads} --distribution=block --kill-on-bad-exit=1{gres}"
        )

    def memory(wildcards):
        nodes, _ = size(wildcards)
        return ceil(
            sum(
                count / nodes * (RANK_MB + MARGIN * engines * LARGEST_RUN / 1e6)
                for count, engines in held(wildcards)
            )
        )

    resources = {
        "nodes": lambda wildcards: size(wildcards)[0],
        # SLURM may spread --gpus unevenly over nodes, but not --gres
        "gpu": gpus,
        "gres": spread(lambda nodes, here: f"gpu:{here * RANK_GPUS}" if RANK_GPUS else None),
        # the plugin wants one of these, and no single task per node
        "tasks": spread(lambda nodes, here: nodes if here == 1 else None),
        "tasks_per_node": spread(lambda nodes, here: here if here > 1 else None),
        "tasks_per_gpu": spread(lambda nodes, here: 0),
        "cpus_per_task": cpus,
        "mpi": spread(lambda nodes, here: "srun"),
        # what the command of the rule begins with
        "start": lambda wildcards: spread(start)(wildcards) or "",
    }
    # otherwise as much as the profile says
    return {**resources, "mem_mb": memory} if held and LARGEST_RUN else resources


def placed_steps(*given):
    """As `placed`, for a command that is outside of the job steps that it starts."""
    resources = placed(*given)
    start = resources.pop("start")

    def option(wildcards):
        return f" --start {shlex.quote(start(wildcards))}" if start(wildcards) else ""

    return {**resources, "steps": option}


def minutes_of_run(wildcards):
    """The profile's `runtime`, or more where the timing of the comparison says that the steps need more."""
    from shardlab.config.timing_record import read_timings  # for clusters alone

    given = default_resource("runtime", None)
    if not isinstance(given, int):
        return given
    whole = next(
        name
        for name in config["timings"]
        if COMPARISON in PARAMETERS(f"timings.{name}").parts(name)
    )
    try:
        timed = read_timings(Path("results/timings", f"{whole}.jsonl"), "")
    except UserError:
        timed = []  # not there yet, or damaged, which the stages that read it will say
    strategy, train, model = PARAMETERS(f"strategies.{wildcards.run}", "train", "model")
    alike = ("world_size", "threads", "batch_size", "accumulation", "sequence_length")
    known = [
        mean(run.step_ms)
        for run in timed
        if (run.timing, run.strategy_hash, run.model) == (COMPARISON, strategy.hash(), model.name)
        and all(getattr(run, name) == getattr(train, name) for name in alike)
    ]
    return max(
        [given, *(BESIDE_STEPS + ceil(SLACK * train.steps * each / 60_000) for each in known)]
    )


def ranks_of_run(wildcards):
    return config["train"]["world_size"]


def link_of_run(wildcards):
    return config["train"].get("link")


def engines_of_run(wildcards):
    return [(ranks_of_run(wildcards), 1)]


def parts_of_timing(wildcards):
    return PARAMETERS(f"timings.{wildcards.timing}").parts(wildcards.timing).values()


def link_of_timing(wildcards):
    return PARAMETERS(f"timings.{wildcards.timing}").link


def engines_of_timing(wildcards):
    """Those of the runs and the one without communication."""
    return [(each.world_size, 1 + len(each.runs)) for each in parts_of_timing(wildcards)]


def link_of_trial(wildcards):
    return ranks_and_link(wildcards.round)[1]


def ranks_of_calibration(wildcards):
    """On several nodes those of train; on one those of each timing that the forecast is fitted on."""
    trained = ranks_of_run(wildcards)
    if nodes_of(trained, link_of_run(wildcards)) > 1:
        return trained
    forecast, timings = PARAMETERS("forecast", "timings")
    known = each_timing(timings)
    return max(known[name].world_size for name in forecast.timings)
