import hashlib
from pathlib import Path

import yaml

from stages.code import STAGES, digests

if config != yaml.safe_load(Path("params.yaml").read_text(encoding="utf-8")):
    raise SystemExit(
        "--config and --configfile do not reach the stages: make run PARAMS=FILE, or change params.yaml"
    )


wildcard_constraints:
    run="|".join(config["strategies"]),
    timing="|".join(config["timings"]),
    input="|".join(config["inputs"]),
    seed=r"\d+",
    round=r"\d+",


TOKENS = [
    *(f"data/tokens/train-{i}.bin" for i in range(config["tokenize"]["shards"])),
    "data/tokens/validation.bin",
    "data/tokens/manifest.json",
]
DATASET = ["data/source.json", "data/tokenizer.json", *TOKENS]
PLOTS = ["loss", "step_time", "bytes_quality", "breakdown", "scaling", "crossover", "forecast"]

# rules that measure time take the cores of all ranks
CORES_OF_RANKS = config["train"]["world_size"] * config["train"]["threads"]


# Digests of the code that each stage imports. As inputs, the files would be looked at again for each job
# that becomes ready. The files in data/code, which hold the same, are for DVC; so are those in data/inputs.
CODE = {stage: digests(stage) for stage in STAGES}


def plan(name):
    """A digest of what a stage uses of params.yaml. The files in data/plans, which hold the same, are
    for DVC: here, a job that waits for a file is not asked whether its own parameters changed."""
    return lambda wildcards: digest_of(PLANS[name.format(**wildcards)])


def digest_of(text):
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def ranks_of_timing(wildcards):
    return max(each.world_size for each in parts_of_timing(wildcards))


def ranks_of_trial(wildcards):
    return ranks_and_link(wildcards.round)[0]


def ranks_and_link(number):
    """Of the races of a round."""
    agent, plan, train = PARAMETERS("agent", f"rounds.{number}", "train")
    search = agent.of(plan)
    return search.world_size or train.world_size, search.link or train.link


def known_before(wildcards):
    """What the round before this one left behind."""
    return config["rounds"][wildcards.round]["after"]


def every_run(pattern):
    """`pattern` for each run and seed of the matrix."""
    return expand(pattern, run=config["strategies"], seed=config["seeds"])
