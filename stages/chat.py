"""Talk to a trained model, or to any Hugging Face model in a folder.

No stage of the pipeline: it needs no params.yaml, writes nothing and may run while a stage does.
"""

import sys
from pathlib import Path

from shardlab.core.document import validate
from shardlab.train.chat import Conversation, Sampling, converse, print_answer


def main(folder: str, prompt: str | None, **sampling: float | None) -> None:
    """Answer one prompt, or each line of stdin."""
    chosen = {key: value for key, value in sampling.items() if value is not None}
    conversation = Conversation(Path(folder), validate(Sampling, chosen, "chat"))
    if prompt is None:
        if sys.stdin.isatty():
            print(conversation.banner())
        converse(conversation)
    else:
        print_answer(conversation, prompt)
