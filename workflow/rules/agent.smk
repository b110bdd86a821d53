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
        code=code("propose"),
        parameters=parameters(
            "rounds.{round}",
            "timings",
            "model",
            "contents.model",
            "forecast.timings",
            "forecast.runs",
            "forecast.space",
            "seeds",
            *TRAINING,
        ),
    shell:
        "exec python -m shardlab propose {wildcards.round:q} &>> {log:q}"


rule trial:
    input:
        "results/rounds/{round}/proposal.json",
        DATASET,
    output:
        "results/rounds/{round}/trial.json",
        directory("results/rounds/{round}/runs"),
    log:
        "logs/trial/{round}.log",
    threads: lambda wildcards: threads_of(raced(wildcards))
    resources:
        **placed_steps(raced),
        timing=1,
    params:
        code=code("trial", "machine"),
        parameters=parameters("rounds.{round}", "model", "contents.model", "seeds", *TRAINING),
    shell:
        "exec python -m shardlab trial {wildcards.round:q}{resources.steps} &>> {log:q}"


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
        code=code("decide"),
        parameters=parameters("rounds.{round}", "timings", "train.link"),
    shell:
        "exec python -m shardlab decide {wildcards.round:q} &>> {log:q}"
