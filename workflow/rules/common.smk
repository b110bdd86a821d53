from pathlib import Path

import yaml

if config != yaml.safe_load(Path("params.yaml").read_text(encoding="utf-8")):
    raise SystemExit(
        "--config and --configfile do not reach the stages: make run PARAMS=FILE, or change params.yaml"
    )
# with every default, as in data/params.yaml, which holds the same for DVC
config.update(VALUES)


wildcard_constraints:
    run="|".join(config["strategies"]),
    timing="|".join(config["timings"]),
    input="|".join(config["inputs"]),
    method="|".join(config["methods"]),
    seed=r"\d+",
    round=r"\d+",


# tokens that other programs made stay where they are
MAPPED = config["data"]["source"] == "tokens"
SHARDS = (
    [] if MAPPED else [*(f"train-{i}" for i in range(config["tokenize"]["shards"])), "validation"]
)
TOKENS = [*(f"data/tokens/{shard}.bin" for shard in SHARDS), "data/tokens/manifest.json"]
TOKENIZER = ["data/tokenizer.json", "data/tokenizer_config.json"]
DATASET = ["data/source.json", *TOKENIZER, *TOKENS]

# parameters of train that give the size of a step
SAMPLES = [
    "train.batch_size",
    "train.global_batch_size",
    "train.accumulation",
    "train.sequence_length",
]
# those that a training run depends on
TRAINING = [f"train.{name}" for name in config["train"] if name not in ("checkpoint", "timeout_s")]


def keys_of(tree, *keys):
    """The values of dotted keys; wildcards are filled in."""

    def values(wildcards):
        found = {}
        for key in keys:
            value = tree
            for part in key.format(**wildcards).split("."):
                value = value[part]
            found[key.format(**wildcards)] = value
        return found

    return values


def parameters(*keys):
    """What a stage depends on of data/params.yaml. Not the file: a job that waits for a file is not
    asked whether its own parameters changed."""
    return keys_of(config, *keys)


def code(*keys):
    """What a stage depends on of data/code.yaml."""
    return keys_of(CODE, *keys)


def known_before(wildcards):
    """What the round before this one left behind."""
    return config["rounds"][wildcards.round]["after"]


def every_run(pattern):
    """`pattern` for each run and seed of the matrix."""
    return expand(pattern, run=config["strategies"], seed=config["seeds"])


def every_seed(pattern):
    """`pattern` for each seed; the run stays a wildcard."""
    return expand(pattern, seed=config["seeds"], allow_missing=True)
