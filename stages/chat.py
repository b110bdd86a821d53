"""Talk to a trained model, or to any Hugging Face model in a folder.

No stage of the pipeline: it needs no params.yaml, writes nothing and may run while a stage does.
"""

import sys
from pathlib import Path

from shardlab.core.document import validate
from shardlab.train.chat import Conversation, Sampling, converse, print_answer
from stages.common import Parser, run_command


def main() -> None:
    """Answer one prompt, or each line of stdin."""
    parser = Parser("chat", description=__doc__)
    parser.add_argument("folder", type=Path, help="final_model of a run, or another model")
    parser.add_argument("--prompt", help="answer this alone, and end")
    for name, field in Sampling.model_fields.items():
        kind = float if isinstance(field.default, float) else int
        words = f"{field.description} (default {field.default})"
        parser.add_argument(f"--{name}".replace("_", "-"), type=kind, metavar="N", help=words)
    given = {key: value for key, value in vars(parser.parse_args()).items() if value is not None}
    folder, prompt = given.pop("folder"), given.pop("prompt", None)
    conversation = Conversation(folder, validate(Sampling, given, "chat"))
    if prompt is None:
        if sys.stdin.isatty():
            print(conversation.banner())
        converse(conversation)
    else:
        print_answer(conversation, prompt)


if __name__ == "__main__":
    run_command("chat", main)
