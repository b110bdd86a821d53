rule check:
    input:
        code(
            "check",
            "shardlab/core",
            "shardlab/experiment",
            "shardlab/strategy",
        ),
    output:
        "data/parameters.ok",
    log:
        "logs/check.log",
    benchmark:
        "logs/benchmarks/check.tsv"
    shell:
        "exec python -m stages.check"


rule prepare:
    input:
        code(
            "prepare",
            "shardlab/core",
            "shardlab/data/corpus",
            "shardlab/data/sources",
            "shardlab/experiment",
            "shardlab/strategy",
        ),
    output:
        # a good corpus stays when a bad source is refused
        update("data/corpus.json"),
        update("data/source.json"),
    log:
        "logs/prepare.log",
    benchmark:
        "logs/benchmarks/prepare.tsv"
    params:
        values=values("data"),
    shell:
        "exec python -m stages.prepare"


rule tokenize:
    input:
        code(
            "tokenize",
            "shardlab/core",
            "shardlab/data/corpus",
            "shardlab/data/tokenize",
            "shardlab/data/tokens",
            "shardlab/experiment",
            "shardlab/strategy",
        ),
        "data/corpus.json",
        "data/source.json",
    output:
        "data/tokenizer.json",
        "data/statistics.json",
        TOKENS,
    log:
        "logs/tokenize.log",
    benchmark:
        "logs/benchmarks/tokenize.tsv"
    threads: config["tokenize"]["shards"]
    params:
        values=values("data", "tokenize"),
    shell:
        "exec python -m stages.tokenize"
