rule code:
    output:
        expand("data/code/{stage}.json", stage=CODE),
    log:
        "logs/code.log",
    params:
        code={path: each for stage in CODE.values() for path, each in stage.items()},
    shell:
        "exec python -m stages.code"


rule content:
    output:
        "data/contents/{input}.json",
    log:
        "logs/content/{input}.log",
    params:
        code=CODE["content"],
        holds=lambda wildcards: CONTENTS[wildcards.input],
        plan=plan("content/{input}"),
    shell:
        "exec python -m stages.content {wildcards.input:q}"


rule plans:
    output:
        expand("data/plans/{name}.json", name=PLANS),
    log:
        "logs/plans.log",
    params:
        code=CODE["plans"],
        plan=digest_of("".join(PLANS.values())),
    shell:
        "exec python -m stages.plans"


rule inputs:
    input:
        expand("data/contents/{name}.json", name=config["inputs"]),
    output:
        expand("data/inputs/{stage}.json", stage=READ),
    log:
        "logs/inputs.log",
    params:
        code=CODE["inputs"],
        plan=plan("inputs"),
    shell:
        "exec python -m stages.inputs"


rule prepare:
    output:
        # a good corpus stays when a bad source is refused
        update("data/corpus.json"),
        update("data/source.json"),
    log:
        "logs/prepare.log",
    params:
        code=CODE["prepare"],
        plan=plan("prepare"),
        read=READ["prepare"],
    shell:
        "exec python -m stages.prepare"


rule tokenize:
    input:
        "data/corpus.json",
        "data/source.json",
    output:
        "data/tokenizer.json",
        "data/statistics.json",
        TOKENS,
    log:
        "logs/tokenize.log",
    threads: config["tokenize"]["shards"]
    params:
        code=CODE["tokenize"],
        plan=plan("tokenize"),
        read=READ["tokenize"],
    shell:
        "exec python -m stages.tokenize"
