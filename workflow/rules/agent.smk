rule propose:
    input:
        code("propose", "shardlab/agent", "shardlab/core"),
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
            "shardlab/agent",
            "shardlab/codecs",
            "shardlab/comm",
            "shardlab/core",
            "shardlab/data",
            "shardlab/engines",
            "shardlab/kernels",
            "shardlab/models",
            "shardlab/profiling",
            "shardlab/train",
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
        code("decide", "shardlab/agent", "shardlab/core"),
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
