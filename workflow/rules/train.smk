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
    threads: threads_of(config["train"])
    resources:
        **placed(lambda wildcards: config["train"]),
        timing=1,
    params:
        code=code("train.{run}"),
        parameters=parameters("strategies.{run}", "model", "contents.model", *TRAINING),
    shell:
        "exec {resources.start} python -m shardlab train --run {wildcards.run:q} --seed {wildcards.seed:q} &>> {log:q}"


rule tune:
    input:
        DATASET,
    output:
        # runs of the former file that are the same are taken over
        update("results/tune/{method}.jsonl"),
    log:
        "logs/tune/{method}.log",
    priority: 1
    threads: lambda wildcards: threads_of(tuned(wildcards))
    resources:
        **placed(tuned),
    params:
        code=code("tune.{method}"),
        parameters=parameters(
            "methods.{method}",
            "tune",
            "model",
            "contents.model",
            "seeds",
            *SAMPLES,
            "train.betas",
            "train.clip",
            "train.decay",
            "train.deterministic",
            "train.learning_rate",
            "train.optimizer",
            "train.placement",
            "train.steps",
            "train.threads",
            "train.warmup_steps",
            "train.weight_decay",
            "train.world_size",
        ),
    shell:
        "exec {resources.start} python -m shardlab tune {wildcards.method:q} &>> {log:q}"


rule profile:
    input:
        every_seed("results/train/{run}/seed{seed}/metrics.json"),
        every_seed("results/train/{run}/seed{seed}/trace.json.gz"),
    output:
        every_seed("results/profile/{run}/seed{seed}.csv"),
        every_seed("results/profile/{run}/seed{seed}.json"),
    log:
        "logs/profile/{run}.log",
    params:
        code=code("profile"),
        parameters=parameters("seeds"),
    shell:
        "exec python -m shardlab profile {wildcards.run:q} &>> {log:q}"


rule validate:
    input:
        every_seed("results/train/{run}/seed{seed}/final_model/config.json"),
        every_seed("results/train/{run}/seed{seed}/final_model/model.safetensors"),
        every_seed("results/train/{run}/seed{seed}/final_model/tokenizer.json"),
        every_seed("results/train/{run}/seed{seed}/final_model/tokenizer_config.json"),
        every_seed("results/train/{run}/seed{seed}/metrics.json"),
        TOKENS,
    output:
        every_seed("results/validate/{run}/seed{seed}.json"),
    log:
        "logs/validate/{run}.log",
    threads: config["train"]["threads"]
    params:
        code=code("validate"),
        parameters=parameters(
            "seeds", "model", "train.threads", "train.placement", "train.sequence_length"
        ),
    shell:
        "exec python -m shardlab validate {wildcards.run:q} &>> {log:q}"


rule timing:
    input:
        TOKENS,
    output:
        "results/timings/{timing}.jsonl",
    log:
        "logs/timing/{timing}.log",
    priority: 1
    # all cores of this machine: no other job disturbs it
    threads: lambda wildcards: max(threads_of(most_ranks(wildcards)), workflow.resource_settings.cores or 1)
    resources:
        **placed(most_ranks),
        timing=1,
    params:
        code=code("timing.{timing}", "machine"),
        parameters=parameters(
            "timings.{timing}",
            "model",
            "contents.model",
            *SAMPLES,
            "train.threads",
            "train.placement",
            "train.deterministic",
            "train.optimizer",
            "train.weight_decay",
            "train.clip",
            "train.profiled_steps",
        ),
    shell:
        "exec {resources.start} python -m shardlab timing {wildcards.timing:q} &>> {log:q}"


rule estimate:
    input:
        "data/tokens/manifest.json",
    output:
        "results/memory.json",
    log:
        "logs/estimate.log",
    params:
        code=code("estimate"),
        parameters=parameters(
            "strategies",
            "model",
            "contents.model",
            *SAMPLES,
            "train.world_size",
            "train.clip",
            "train.optimizer",
        ),
    shell:
        "exec python -m shardlab estimate &>> {log:q}"


rule collect:
    input:
        every_run("results/train/{run}/seed{seed}/metrics.json"),
        expand(rules.timing.output, timing=config["timings"]),
        rules.estimate.output,
        expand(rules.profile.output, run=config["strategies"]),
        expand(rules.validate.output, run=config["strategies"]),
    output:
        "results/results.jsonl",
        "results/results.csv",
    log:
        "logs/collect.log",
    params:
        code=code("collect"),
        parameters=parameters("strategies", "seeds", "timings"),
    shell:
        "exec python -m shardlab collect &>> {log:q}"
