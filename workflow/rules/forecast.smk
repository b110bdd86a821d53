rule calibrate:
    input:
        # in a new clone it is newer than the results, which are those of another machine
        "stages/calibrate.py",
    output:
        "results/calibration.json",
        "results/hardware.json",
    log:
        "logs/calibrate.log",
    benchmark:
        "logs/benchmarks/calibrate.tsv"
    priority: 1
    threads: CORES_OF_RANKS
    resources:
        **placed(ranks_of_run, link_of_run),
        timing=1,
    params:
        code=code(
            "calibrate",
            "csrc",
            "shardlab/activations",
            "shardlab/calibration",
            "shardlab/codecs",
            "shardlab/core",
            "shardlab/devices",
            "shardlab/emulation",
            "shardlab/environment",
            "shardlab/experiment",
            "shardlab/hardware",
            "shardlab/kernels",
            "shardlab/launch",
            "shardlab/measurements",
            "shardlab/profiling/traces",
            "shardlab/records",
            "shardlab/strategy",
            "shardlab/transport",
        ),
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
    benchmark:
        "logs/benchmarks/forecast.tsv"
    params:
        code=code(
            "forecast",
            "shardlab/buffers",
            "shardlab/collection",
            "shardlab/core",
            "shardlab/experiment",
            "shardlab/forecast",
            "shardlab/measurements",
            "shardlab/records",
            "shardlab/strategy",
        ),
        plan=plan("forecast"),
    shell:
        "exec python -m stages.forecast"
