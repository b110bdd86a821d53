rule train:
    input:
        DATASET,
    output:
        "results/train/{run}/seed{seed}/metrics.json",
        "results/train/{run}/seed{seed}/events.jsonl",
        "results/train/{run}/seed{seed}/trace.json.gz",
        "results/train/{run}/seed{seed}/final_model/config.json",
        "results/train/{run}/seed{seed}/final_model/model.safetensors",
        "results/train/{run}/seed{seed}/final_model/tokenizer.json",
        "results/train/{run}/seed{seed}/final_model/tokenizer_config.json",
    log:
        "logs/train/{run}/{seed}.log",
    # all of these first: then the jobs of one core each fill the machine side by side
    priority: 1
    threads: CORES_OF_RANKS
    resources:
        **placed(ranks_of_run, link_of_run, held=engines_of_run),
        **({"runtime": minutes_of_run} if default_resource("runtime", None) else {}),
        timing=1,
    params:
        code=CODE["train"],
        plan=plan("train/{run}"),
        read=READ["train"],
    shell:
        "exec {resources.start} python -m stages.train --run {wildcards.run:q} --seed {wildcards.seed:q}"


rule profile:
    input:
        "results/train/{run}/seed{seed}/metrics.json",
        "results/train/{run}/seed{seed}/trace.json.gz",
    output:
        "results/profile/{run}/seed{seed}.csv",
        "results/profile/{run}/seed{seed}.json",
    log:
        "logs/profile/{run}/{seed}.log",
    params:
        code=CODE["profile"],
    shell:
        "exec python -m stages.profile {wildcards.run:q} {wildcards.seed:q}"


rule validate:
    input:
        "results/train/{run}/seed{seed}/final_model/config.json",
        "results/train/{run}/seed{seed}/final_model/model.safetensors",
        "results/train/{run}/seed{seed}/final_model/tokenizer.json",
        "results/train/{run}/seed{seed}/final_model/tokenizer_config.json",
        "results/train/{run}/seed{seed}/metrics.json",
        "data/tokens/validation.bin",
        "data/tokens/manifest.json",
    output:
        "results/validate/{run}/seed{seed}.json",
    log:
        "logs/validate/{run}/{seed}.log",
    threads: config["train"]["threads"]
    params:
        code=CODE["validate"],
        plan=plan("validate"),
    shell:
        "exec python -m stages.validate {wildcards.run:q} {wildcards.seed:q}"


rule timing:
    input:
        TOKENS,
    output:
        "results/timings/{timing}.jsonl",
    log:
        "logs/timing/{timing}.log",
    priority: 1
    # all cores of this machine: no other job disturbs it
    threads:
        lambda wildcards: max(
            ranks_of_timing(wildcards) * config["train"]["threads"],
            workflow.resource_settings.cores or 1,
        )
    resources:
        **placed(ranks_of_timing, link_of_timing, engines_of_timing),
        timing=1,
    params:
        code=CODE["timing"],
        plan=plan("timing/{timing}"),
        read=READ["timing"],
    shell:
        "exec {resources.start} python -m stages.timing {wildcards.timing:q}"


rule estimate:
    input:
        "data/tokens/manifest.json",
    output:
        "results/memory.json",
    log:
        "logs/estimate.log",
    params:
        code=CODE["estimate"],
        plan=plan("estimate"),
        read=READ["estimate"],
    shell:
        "exec python -m stages.estimate"


rule collect:
    input:
        every_run("results/train/{run}/seed{seed}/metrics.json"),
        every_run("results/train/{run}/seed{seed}/events.jsonl"),
        expand(rules.timing.output, timing=config["timings"]),
        rules.estimate.output,
        every_run(rules.profile.output),
        every_run(rules.validate.output),
    output:
        "results/results.jsonl",
        "results/results.csv",
    log:
        "logs/collect.log",
    params:
        code=CODE["collect"],
        plan=plan("collect"),
    shell:
        "exec python -m stages.collect"
