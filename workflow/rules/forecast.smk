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
    threads: lambda wildcards: ranks_of_calibration(wildcards) * config["train"]["threads"]
    resources:
        **placed(ranks_of_calibration, link_of_run),
        timing=1,
    params:
        code=CODE["calibrate"],
        plan=plan("calibrate"),
    shell:
        "exec {resources.start} python -m stages.calibrate"


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
        "results/forecast/chakra.zip",
    log:
        "logs/forecast.log",
    params:
        code=CODE["forecast"],
        plan=plan("forecast"),
    shell:
        "exec python -m stages.forecast"
