rule propose:
    input:
        "data/statistics.json",
        "data/tokens/manifest.json",
        "results/calibration.json",
        "results/hardware.json",
        "results/results.jsonl",
        INPUTS,
        expand(rules.timing.output, timing=config["timings"]),
        known_before,
    output:
        "results/rounds/{round}/conversation.json",
        "results/rounds/{round}/proposal.json",
    log:
        "logs/propose/{round}.log",
    benchmark:
        "logs/benchmarks/propose/{round}.tsv"
    params:
        code=code(
            "propose",
            "shardlab/agent/proposals",
            "shardlab/agent/records",
            "shardlab/agent/space",
            "shardlab/buffers",
            "shardlab/core",
            "shardlab/experiment",
            "shardlab/forecast",
            "shardlab/measurements",
            "shardlab/memory",
            "shardlab/models",
            "shardlab/records",
            "shardlab/strategy",
            "shardlab/units",
        ),
        plan=plan("propose/{round}"),
    shell:
        "exec python -m stages.propose {wildcards.round:q}"


rule trial:
    input:
        "results/rounds/{round}/proposal.json",
        DATASET,
    output:
        "results/rounds/{round}/trial.json",
    log:
        "logs/trial/{round}.log",
    benchmark:
        "logs/benchmarks/trial/{round}.tsv"
    threads: lambda wildcards: ranks_of_trial(wildcards) * config["train"]["threads"]
    resources:
        **placed_steps(ranks_of_trial, link_of_trial),
        timing=1,
    params:
        code=code(
            "trial",
            "csrc",
            "shardlab/activations",
            "shardlab/agent/decisions",
            "shardlab/agent/races",
            "shardlab/agent/records",
            "shardlab/agent/trials",
            "shardlab/buffers",
            "shardlab/checkpoint",
            "shardlab/codecs",
            "shardlab/comm",
            "shardlab/core",
            "shardlab/data/tokens",
            "shardlab/devices",
            "shardlab/emulation",
            "shardlab/engines",
            "shardlab/environment",
            "shardlab/evaluation",
            "shardlab/experiment",
            "shardlab/hardware",
            "shardlab/kernels",
            "shardlab/launch",
            "shardlab/loop",
            "shardlab/memory",
            "shardlab/models",
            "shardlab/profiling",
            "shardlab/records",
            "shardlab/strategy",
            "shardlab/timing",
            "shardlab/train",
            "shardlab/transport",
            "shardlab/units",
        ),
        plan=plan("trial/{round}"),
    shell:
        "exec python -m stages.trial {wildcards.round:q}{resources.steps}"


rule decide:
    input:
        "results/results.jsonl",
        "results/rounds/{round}/proposal.json",
        "results/rounds/{round}/trial.json",
        expand(rules.timing.output, timing=config["timings"]),
        known_before,
    output:
        "results/rounds/{round}/history.json",
    log:
        "logs/decide/{round}.log",
    benchmark:
        "logs/benchmarks/decide/{round}.tsv"
    params:
        code=code(
            "decide",
            "shardlab/agent/decisions",
            "shardlab/agent/races",
            "shardlab/agent/records",
            "shardlab/core",
            "shardlab/experiment",
            "shardlab/records",
            "shardlab/strategy",
        ),
        plan=plan("decide/{round}"),
    shell:
        "exec python -m stages.decide {wildcards.round:q}"


rule policies:
    input:
        "data/tokens/manifest.json",
        "results/calibration.json",
        "results/results.jsonl",
        INPUTS,
        expand(rules.timing.output, timing=config["timings"]),
    output:
        "results/policies/conversation.json",
        "results/policies/policies.json",
    log:
        "logs/policies.log",
    benchmark:
        "logs/benchmarks/policies.tsv"
    params:
        code=code(
            "policies",
            "shardlab/agent/policies",
            "shardlab/agent/proposals",
            "shardlab/agent/records",
            "shardlab/agent/replays",
            "shardlab/agent/space",
            "shardlab/buffers",
            "shardlab/core",
            "shardlab/experiment",
            "shardlab/forecast",
            "shardlab/measurements",
            "shardlab/memory",
            "shardlab/models",
            "shardlab/records",
            "shardlab/strategy",
            "shardlab/units",
        ),
        plan=plan("policies"),
    shell:
        "exec python -m stages.policies"
