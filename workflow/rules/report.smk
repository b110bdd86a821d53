rule report:
    input:
        "data/source.json",
        "data/statistics.json",
        "results/forecast/forecast.json",
        "results/results.jsonl",
        every_run("results/train/{run}/seed{seed}/events.jsonl"),
        expand(rules.timing.output, timing=config["timings"]),
        expand(rules.tune.output, method=config["methods"]),
        expand(
            "results/rounds/{round}/{file}",
            round=config["rounds"],
            file=["history.json", "proposal.json", "runs", "trial.json"],
        ),
    output:
        "results/report/report.html",
        "results/report/tables.md",
        report(
            "results/report/headline.md",
            caption="../report/headline.rst",
            category="Comparison",
        ),
        report(
            "results/report/comparison.csv",
            caption="../report/comparison.rst",
            category="Comparison",
        ),
        "results/report/comparison.jsonl",
        "results/report/loss.csv",
        "results/report/quality.jsonl",
        "results/report/summary.json",
        "results/report/timings.csv",
        report(
            directory("results/report/plots/svg"),
            patterns=["{plot}.svg"],
            caption="../report/plots.rst",
            category="Plots",
        ),
        directory("results/report/plots/png"),
    log:
        "logs/report.log",
    params:
        code=code("report"),
        parameters=parameters(
            "strategies",
            "timed_strategies",
            "seeds",
            "baseline",
            "timings",
            "comparison",
            "methods",
            "quality",
            "rounds",
            "train.accumulation",
            "train.betas",
            "train.steps",
            "train.world_size",
            "tune",
        ),
    shell:
        "exec python -m shardlab report &>> {log:q}"


rule readme:
    input:
        "results/report/headline.md",
    output:
        "results/report/readme.md",
    log:
        "logs/readme.log",
    params:
        code=code("readme"),
    shell:
        "exec python -m shardlab readme &>> {log:q}"
