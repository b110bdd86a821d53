"""The contract of a language model that answers prompts, and answers that were kept."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from shardlab.core.errors import UserError
from shardlab.search.conversation import Conversation, Exchange
from shardlab.search.prompt import Prompt


class Chat(ABC):
    """Language model that answers one prompt at a time, each without memory of the others."""

    name: str
    """as a judge"""
    model: str | None = None
    """its name at the endpoint, or path"""
    endpoint: str | None = None
    dialect: str | None = None
    """in which the endpoint takes the schema"""

    @abstractmethod
    def ask(self, prompt: Prompt) -> str:
        """Return the text of the answer, which may be anything.

        Raises:
            UserError: there is none.
        """

    def conversation(self, answers: Sequence[tuple[Prompt, str]]) -> Conversation:
        """Return the conversation to keep, in which these answers were given."""
        return Conversation(
            judge=self.name,
            endpoint=self.endpoint,
            model=self.model,
            dialect=self.dialect,
            # equal in all prompts
            system=answers[0][0].system if answers else "",
            exchanges=[
                Exchange(user=prompt.user, ids=[*prompt.ids], answer=answer)
                for prompt, answer in answers
            ],
        )


class Replay(Chat):
    """Answers of conversations that were kept, found by the hash of the whole prompt.

    Args:
        path: of a conversation, or of a folder of them.

    Raises:
        UserError: one is missing or damaged, or answers a prompt otherwise than another one.
    """

    name = "replay"

    def __init__(self, path: Path) -> None:
        self._path = path
        self._answers: dict[str, str] = {}
        files: dict[str, Path] = {}
        for file in sorted(path.glob("*.json")) if path.is_dir() else [path]:
            kept = Conversation.from_file(file, f"restore it (git checkout {file})")
            for each in kept.exchanges:
                key = Prompt(kept.system, each.user, tuple(each.ids)).hash
                if self._answers.setdefault(key, each.answer) != each.answer:
                    other = files[key]
                    raise UserError(f"{file}: answers otherwise than {other}: remove one of them")
                files.setdefault(key, file)

    def ask(self, prompt: Prompt) -> str:  # noqa: D102
        if prompt.hash not in self._answers:
            raise UserError(
                f"{self._path}: holds no answer to prompt {prompt.hash[:8]} on candidates "
                f"{', '.join(prompt.ids)}: copy the conversation that does, or ask the model, with "
                "agent.judge http or local"
            )
        return self._answers[prompt.hash]
