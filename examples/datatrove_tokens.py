"""Tokens of a large corpus by datatrove, on its executors, for `data.source: tokens`.

    python examples/datatrove_tokens.py JSONL_FOLDER TOKENIZER_JSON TOKENS_FOLDER

`--slurm PARTITION` starts the tasks as jobs of SLURM in place of processes here.
"""

import argparse

from datatrove.executor import LocalPipelineExecutor, SlurmPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("texts", help="folder of .jsonl files with a key text, also .gz or .zst")
    parser.add_argument("tokenizer", help="tokenizer.json, or a name on the Hugging Face hub")
    parser.add_argument("tokens", help="folder to write")
    parser.add_argument("--end", default="<|endoftext|>", help="token that ends a document")
    parser.add_argument("--tasks", type=int, default=2, help="at most as many as files are at work")
    parser.add_argument("--slurm", metavar="PARTITION")
    args = parser.parse_args()
    pipeline = [
        JsonlReader(args.texts),
        # shuffles the documents of each file, so that the last ones are a fair validation split
        DocumentTokenizer(args.tokens, args.tokenizer, eos_token=args.end, seed=0),
    ]
    # a task that is done is not done again when the same command runs once more
    logs = f"{args.tokens}.logs"
    if args.slurm is None:
        LocalPipelineExecutor(
            pipeline, tasks=args.tasks, workers=args.tasks, logging_dir=logs
        ).run()
    else:
        SlurmPipelineExecutor(
            pipeline, tasks=args.tasks, time="24:00:00", partition=args.slurm, logging_dir=logs
        ).run()
