from snakemake.utils import min_version

min_version("9.0")


# first: Snakemake reads the file less strictly, and shows its mistakes with a traceback
include: "workflow/rules/check.smk"


configfile: "params.yaml"


report: "workflow/report/workflow.rst"


# for `snakemake --software-deployment-method apptainer`: containers/shardlab.def says how to build it
container: "shardlab.sif"


include: "workflow/rules/lock.smk"
include: "workflow/rules/summary.smk"
include: "workflow/rules/common.smk"
include: "workflow/rules/cluster.smk"
include: "workflow/rules/data.smk"
include: "workflow/rules/train.smk"
include: "workflow/rules/forecast.smk"
include: "workflow/rules/agent.smk"
include: "workflow/rules/report.smk"


rule all:
    default_target: True
    # the products of every rule: Snakemake makes no file again that nothing here asks for
    input:
        rules.params.output,
        "data/corpus.json",
        "data/statistics.json",
        DATASET,
        every_run(rules.train.output),
        expand([*rules.profile.output, *rules.validate.output], run=config["strategies"]),
        expand(rules.tune.output, method=config["methods"]),
        expand(rules.timing.output, timing=config["timings"]),
        rules.calibrate.output,
        rules.estimate.output,
        rules.forecast.output,
        rules.collect.output,
        expand(
            [*rules.propose.output, *rules.trial.output, *rules.decide.output],
            round=config["rounds"],
        ),
        rules.report.output,
