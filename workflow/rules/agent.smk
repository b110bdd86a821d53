rule propose:
    input:
        "data/statistics.json",
        "data/tokens/manifest.json",
        "results/calibration.json",
        "results/hardware.json",
        "results/results.jsonl",
        expand(rules.timing.output, timing=config["timings"]),
        known_before,
    output:
        "results/rounds/{round}/proposal.json",
    log:
        "logs/propose/{round}.log",
    params:
        code=CODE["propose"],
        plan=plan("propose/{round}"),
        read=READ["propose"],
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
    threads: lambda wildcards: ranks_of_trial(wildcards) * config["train"]["threads"]
    resources:
        **placed_steps(ranks_of_trial, link_of_trial),
        timing=1,
    params:
        code=CODE["trial"],
        plan=plan("trial/{round}"),
        read=READ["trial"],
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
    params:
        code=CODE["decide"],
        plan=plan("decide/{round}"),
    shell:
        "exec python -m stages.decide {wildcards.round:q}"
