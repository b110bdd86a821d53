rule inputs:
    output:
        "data/inputs/{input}.json",
    log:
        "logs/inputs/{input}.log",
    params:
        path=lambda wildcards: config["inputs"][wildcards.input],
        content=lambda wildcards: content_of(config["inputs"], wildcards.input).sha256,
    shell:
        "exec python -m shardlab inputs {wildcards.input:q} &>> {log:q}"


rule params:
    input:
        expand("data/inputs/{name}.json", name=config["inputs"]),
    output:
        "data/code.yaml",
        "data/params.yaml",
    log:
        "logs/params.log",
    params:
        code=CODE,
        parameters=VALUES,
    shell:
        "exec python -m shardlab params &>> {log:q}"


rule prepare:
    output:
        # a good corpus stays when a bad source is refused
        update("data/corpus.json"),
        update("data/source.json"),
    log:
        "logs/prepare.log",
    params:
        code=code("prepare"),
        parameters=parameters(
            *(f"data.{name}" for name in config["data"] if name != "validation_share"),
            "contents.corpus",
        ),
    shell:
        "exec python -m shardlab prepare &>> {log:q}"


rule tokenize:
    input:
        "data/corpus.json",
        "data/source.json",
    output:
        "data/tokenizer.json",
        "data/tokenizer_config.json",
        "data/statistics.json",
        TOKENS,
    log:
        "logs/tokenize.log",
    threads: config["tokenize"]["shards"]
    params:
        code=code("tokenize"),
        parameters=parameters("tokenize", "data.validation_share", "contents.tokenizer"),
    shell:
        "exec python -m shardlab tokenize &>> {log:q}"
