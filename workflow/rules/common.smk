import json
from pathlib import Path

import yaml

from shardlab.experiment.parameters import Parameters

if config != yaml.safe_load(Path("params.yaml").read_text(encoding="utf-8")):
    raise SystemExit(
        "--config and --configfile do not reach the stages: change params.yaml instead"
    )


wildcard_constraints:
    run="|".join(config["runs"]),
    timing="|".join(config["timings"]),
    seed=r"\d+",
    round=r"\d+",


TOKENS = [
    *(f"data/tokens/train-{i}.bin" for i in range(config["tokenize"]["shards"])),
    "data/tokens/validation.bin",
    "data/tokens/manifest.json",
]
# valid parameters are no reason to repeat what they leave as it is
CHECKED = ancient("data/parameters.ok")
DATASET = ["data/source.json", "data/tokenizer.json", *TOKENS]
PLOTS = ["loss", "step_time", "bytes_quality", "breakdown", "scaling", "crossover", "forecast"]

# rules that measure time take the cores of all ranks
CORES_OF_RANKS = config["train"]["world_size"] * config["train"]["threads"]


def code(name, *folders):
    """The files that a stage runs. params.yaml is read by every stage and watched by none:
    the values that a stage depends on are named in its `params`."""
    return [
        ancient("params.yaml"),
        "stages/__init__.py",
        "stages/common.py",
        f"stages/{name}.py",
        "shardlab/__init__.py",
        *(file for folder in folders for file in sources(folder)),
        # what runs codecs also runs those of the user
        *(sources("user_codecs") if "shardlab/codecs" in folders else []),
    ]


def sources(folder):
    """Files of a folder of code, less the by-products that .dvcignore names."""
    return sorted(
        str(path)
        for path in Path(folder).rglob("*")
        if path.is_file() and path.suffix != ".so" and "__pycache__" not in path.parts
    )


def values(*keys):
    """The values that a stage reads, as text that changes only when a value does."""
    return {
        key: json.dumps(lookup(dpath=key.replace(".", "/"), within=config), sort_keys=True)
        for key in keys
    }


def values_of_run(wildcards):
    return values("model", f"strategies.{wildcards.run}", "train")


def values_of_timing(wildcards):
    return values("model", "strategies", f"timings.{wildcards.timing}", "train")


def ranks_of_timing(wildcards):
    return Parameters("params.yaml")(f"timings.{wildcards.timing}").world_size


def values_of_proposal(wildcards):
    return values("agent", "forecast", "model", f"rounds.{wildcards.round}", "timings", "train")


def values_of_trial(wildcards):
    return values("agent", "model", f"rounds.{wildcards.round}", "seeds", "train")


def ranks_of_trial(wildcards):
    parameters = Parameters("params.yaml")
    agent, plan, train = parameters("agent", f"rounds.{wildcards.round}", "train")
    return agent.of(plan).world_size or train.world_size


def values_of_decision(wildcards):
    return values("agent", f"rounds.{wildcards.round}", "timings", "train")


def known_before(wildcards):
    """What the round before this one left behind."""
    return config["rounds"][wildcards.round]["after"]


def every_run(pattern):
    """`pattern` for each run and seed of the matrix."""
    return expand(pattern, run=config["runs"], seed=config["seeds"])
