"""Talk to a trained model, or to any Hugging Face model in a folder.

No stage of the pipeline: it needs no params.yaml, writes nothing and may run while a stage does.
"""

import argparse
import gc
import sys
from pathlib import Path
from typing import NoReturn

from shardlab.chat.conversation import Conversation, Sampling
from shardlab.chat.terminal import converse, show
from shardlab.core.document import validate
from shardlab.core.errors import UserError
from shardlab.core.progress import say


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Print one line, without the usage."""
        say(f"chat: error: {message}; see {self.prog} --help")
        sys.exit(2)


def main() -> None:
    """Answer one prompt, or each line of stdin."""
    parser = _Parser("python -m stages.chat", description=__doc__)
    parser.add_argument("folder", type=Path, help="final_model of a run, or another model")
    parser.add_argument("--prompt", help="answer this alone, and end")
    for name, field in Sampling.model_fields.items():
        kind = float if isinstance(field.default, float) else int
        words = f"{field.description} (default {field.default})"
        parser.add_argument(f"--{name}".replace("_", "-"), type=kind, metavar="N", help=words)
    given = {key: value for key, value in vars(parser.parse_args()).items() if value is not None}
    folder, prompt = given.pop("folder"), given.pop("prompt", None)
    conversation = Conversation(folder, validate(Sampling, given, "chat"))
    if not conversation.verified:
        say(f"chat: {folder}: no metrics.json next to it: its files are not verified")
    if prompt is None:
        converse(conversation)
    else:
        show(conversation.answer(prompt))


if __name__ == "__main__":
    gc.enable()  # off during imports, see stages/__init__.py
    try:
        main()
    except UserError as mistake:
        say(f"chat: error: {mistake}")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
