rule propose:
    input:
        code(
            "propose",
            "shardlab/agent/proposals",
            "shardlab/agent/records",
            "shardlab/buffers",
            "shardlab/core",
            "shardlab/environment",
            "shardlab/experiment",
            "shardlab/memory",
            "shardlab/records",
            "shardlab/strategy",
        ),
        "results/results.jsonl",
        known_before,
    output:
        "results/rounds/{round}/proposal.json",
    log:
        "logs/propose/{round}.log",
    benchmark:
        "logs/benchmarks/propose/{round}.tsv"
    params:
        values=values_of_proposal,
    shell:
        "exec python -m stages.propose {wildcards.round}"


rule trial:
    input:
        code(
            "trial",
            "csrc",
            "shardlab/activations",
            "shardlab/agent/records",
            "shardlab/agent/trials",
            "shardlab/buffers",
            "shardlab/checkpoint",
            "shardlab/codecs",
            "shardlab/comm",
            "shardlab/core",
            "shardlab/data/corpus",
            "shardlab/data/tokenize",
            "shardlab/data/tokens",
            "shardlab/emulation",
            "shardlab/engines",
            "shardlab/environment",
            "shardlab/evaluation",
            "shardlab/experiment",
            "shardlab/hardware",
            "shardlab/kernels",
            "shardlab/launch",
            "shardlab/loop",
            "shardlab/models",
            "shardlab/profiling",
            "shardlab/records",
            "shardlab/strategy",
            "shardlab/train",
            "shardlab/transport",
        ),
        "results/rounds/{round}/proposal.json",
        DATASET,
    output:
        "results/rounds/{round}/trial.json",
    log:
        "logs/trial/{round}.log",
    benchmark:
        "logs/benchmarks/trial/{round}.tsv"
    threads: CORES_OF_RANKS
    resources:
        gpu=config["train"]["world_size"],
        timing=1,
    params:
        values=values("agent", "model", "seeds", "train"),
    shell:
        "exec python -m stages.trial {wildcards.round}"


rule decide:
    input:
        code(
            "decide",
            "shardlab/agent/decisions",
            "shardlab/agent/records",
            "shardlab/core",
            "shardlab/experiment",
            "shardlab/records",
            "shardlab/strategy",
        ),
        "results/results.jsonl",
        "results/rounds/{round}/proposal.json",
        "results/rounds/{round}/trial.json",
        known_before,
    output:
        "results/rounds/{round}/history.json",
    log:
        "logs/decide/{round}.log",
    benchmark:
        "logs/benchmarks/decide/{round}.tsv"
    params:
        values=values_of_decision,
    shell:
        "exec python -m stages.decide {wildcards.round}"
