rule calibrate:
    input:
        # in a new clone it is newer than the results, which are those of another machine
        "stages/calibrate.py",
    output:
        "results/calibration.json",
        "results/hardware.json",
    log:
        "logs/calibrate.log",
    priority: 1
    threads: lambda wildcards: threads_of(calibrated(wildcards))
    resources:
        **placed(calibrated),
        timing=1,
    params:
        code=code("calibrate", "machine"),
        parameters=parameters(
            "calibration",
            "forecast.space",
            "train.world_size",
            "train.threads",
            "train.placement",
        ),
    shell:
        "exec {resources.start} python -m shardlab calibrate &>> {log:q}"


rule forecast:
    input:
        "results/calibration.json",
        expand(rules.timing.output, timing=config["timings"]),
    output:
        "results/forecast/forecast.json",
        "results/forecast/checks.csv",
        "results/forecast/scaling.csv",
        "results/forecast/operations.csv",
        "results/forecast/break_even.csv",
    log:
        "logs/forecast.log",
    params:
        code=code("forecast"),
        parameters=parameters(
            "forecast.timings", "forecast.runs", "forecast.ranks", "forecast.links", "timings"
        ),
    shell:
        "exec python -m shardlab forecast &>> {log:q}"
