import hashlib
from functools import cache
from pathlib import Path

import yaml

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


INPUTS = [f"data/inputs/{name}.json" for name in config["inputs"]]
TOKENS = [
    *(f"data/tokens/train-{i}.bin" for i in range(config["tokenize"]["shards"])),
    "data/tokens/validation.bin",
    "data/tokens/manifest.json",
]
DATASET = ["data/source.json", "data/tokenizer.json", *TOKENS]
PLOTS = ["loss", "step_time", "bytes_quality", "breakdown", "scaling", "crossover", "forecast"]

# rules that measure time take the cores of all ranks
CORES_OF_RANKS = config["train"]["world_size"] * config["train"]["threads"]


def code(name, *folders):
    """A digest for each folder and file of code that a stage runs. As inputs, these files would be
    looked at again for each job that becomes ready."""
    own = ["shardlab/__init__.py", *(f"stages/{part}.py" for part in ("__init__", "common", name))]
    if name not in ("profile", "readme"):  # which read no parameters
        own.append("stages/plans.py")
    # what runs codecs also runs those of the user
    of_user = ["user_codecs"] if "shardlab/codecs" in folders else []
    return {path: digest(path) for path in sorted({*own, *folders, *of_user})}


@cache
def digest(path):
    """Hash of a file, or of a folder less the by-products that .dvcignore names."""
    files = [Path(path)] if Path(path).is_file() else sorted(Path(path).rglob("*"))
    found = hashlib.sha256()
    for file in files:
        if file.is_file() and file.suffix != ".so" and "__pycache__" not in file.parts:
            found.update(f"{file} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return found.hexdigest()[:16]


def plan(name):
    """A digest of what a stage uses of params.yaml. The files in data/plans, which hold the same, are
    for DVC: here, a job that waits for a file is not asked whether its own parameters changed."""
    return lambda wildcards: digest_of(PLANS[name.format(**wildcards)])


def digest_of(text):
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def ranks_of_timing(wildcards):
    return PARAMETERS(f"timings.{wildcards.timing}").world_size


def ranks_of_trial(wildcards):
    agent, plan, train = PARAMETERS("agent", f"rounds.{wildcards.round}", "train")
    return agent.of(plan).world_size or train.world_size


def known_before(wildcards):
    """What the round before this one left behind."""
    return config["rounds"][wildcards.round]["after"]


def every_run(pattern):
    """`pattern` for each run and seed of the matrix."""
    return expand(pattern, run=config["strategies"], seed=config["seeds"])
