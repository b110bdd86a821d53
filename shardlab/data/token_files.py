"""Token files of other programs, mapped in place: .bin of nanoGPT and llm.c, .bin with .idx of
Megatron, .ds of datatrove, and folders that `datasets` saved."""

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
from pydantic import Field, StringConstraints

from shardlab.core.content import Content
from shardlab.core.document import Document
from shardlab.core.errors import UserError
from shardlab.core.files import read_json
from shardlab.data.settings import Data

_SUFFIXES = (".bin", ".ds", ".arrow")
_LLM_C = {(20240520, 1): "uint16", (20240801, 7): "uint32"}
"""Types by magic number and version, from dev/data/data_common.py of karpathy/llm.c."""
_MEGATRON = struct.Struct("<9sQBQQ")
"""Header of an .idx file: magic, version, type, sequences, ends of documents
(megatron/core/datasets/indexed_dataset.py)."""
_MEGATRON_TYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_CHUNK = 1 << 24
"""Tokens to scan at once."""
_AGAIN = "run shardlab prepare, then shardlab tokenize"


class TokenFile(Document):
    """Complete documents in a file of another program."""

    content: Content
    """Content of the file when its tokens were counted."""
    dtype: Annotated[str, StringConstraints(pattern=r"^u?int(8|16|32|64)$")]
    """Type of the tokens, little-endian."""
    ranges: list[list[int]]
    """Byte offset and number of tokens of each range."""
    documents: int = Field(ge=0)
    """Number of documents."""
    bytes: ClassVar[None] = None
    """Bytes of the text, which are unknown."""
    altered: ClassVar[int] = 0

    def arrays(self, folder: Path, dtype: str) -> list[np.ndarray]:
        """Map the ranges.

        Raises:
            UserError: The file is missing, or is too short.
        """
        path, width = Path(self.content.path), np.dtype(self.dtype).itemsize
        end = max((offset + count * width for offset, count in self.ranges), default=0)
        if not path.is_file() or path.stat().st_size < end:
            raise _changed(path)
        return map_ranges(path, self.dtype, self.ranges)

    def verify(self, folder: Path, dtype: str, vocabulary: int) -> None:
        """Check that the file did not change since its tokens were compared with the vocabulary.

        Raises:
            UserError: The file changed or is missing.
        """
        refuse_change(self.content)


def refuse_change(content: Content) -> None:
    """Check that a file did not change; read it only if its size or date is different.

    Raises:
        UserError: The file changed or is missing.
    """
    current = Content.of(content.path, content)
    if current is None or current.sha256 != content.sha256:
        raise _changed(Path(content.path))


def _changed(path: Path) -> UserError:
    if not path.is_file():
        return UserError(f"{path}: no such file: set data.path to where it is, and {_AGAIN}")
    return UserError(f"{path}: changed since its tokens were counted: {_AGAIN}")


class TokenLayout(NamedTuple):
    """Offsets and type of the tokens of a file."""

    dtype: str
    ranges: list[list[int]]
    """Byte offset and number of tokens of each range."""
    ends: np.ndarray | None
    """Ends of the documents, in tokens; None: the end-of-text token marks them."""


def map_ranges(path: str | Path, dtype: str, ranges: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Map ranges of a file, each a byte offset and a number of tokens."""
    if not ranges:  # an empty file cannot be mapped
        return []
    kind = np.dtype(dtype).newbyteorder("<")
    raw = np.asarray(np.memmap(path, np.uint8, mode="r"))
    return [raw[offset : offset + count * kind.itemsize].view(kind) for offset, count in ranges]


def find_token_files(data: Data) -> list[Path]:
    """Return the token files of `data.path`, in a folder in the order of their names.

    Raises:
        UserError: There are no token files.
    """
    path = Path(str(data.path))
    if not path.exists():
        raise UserError(f"data.path {data.path!r}: no such file or folder")
    files = [path] if path.is_file() else [*_files_below(path, data)]
    if token_files := [file for file in files if file.suffix in _SUFFIXES]:
        _check_token_files(data, token_files)
        return token_files
    if packed := [file for file in files if file.suffix == ".parquet"]:
        raise UserError(
            f"{packed[0]}: Parquet is packed and cannot be mapped: unpack it once, "
            "datasets.load_dataset('parquet', data_files=FILES)['train'].save_to_disk(FOLDER)"
        )
    raise UserError(f"data.path {data.path!r}: no .bin, .ds or .arrow file there")


def _check_token_files(data: Data, files: list[Path]) -> None:
    if not any(file.suffix == ".arrow" for file in files):
        for key, default in (("split", None), ("ids_column", "input_ids")):
            if getattr(data, key) != default:
                raise UserError(f"data.{key}: no file that datasets saved is there: remove it")
    if missing := [file for file in files if not file.is_file()]:
        raise UserError(f"{missing[0]}: no such file: copy the whole folder, or remove the link")
    by_target = {file.resolve(): file for file in files}
    if len(by_target) < len(files):
        link = next(file for file in files if file not in by_target.values())
        raise UserError(
            f"{link}: the same file as {by_target[link.resolve()]}: remove one of these links"
        )


def _files_below(folder: Path, data: Data) -> Iterator[Path]:
    """Yield the files of a folder and its subfolders.

    Of a folder that `datasets` saved, yield the files that it lists.
    """
    if (folder / "dataset_dict.json").is_file():
        names = sorted(_saved(folder / "dataset_dict.json", "splits"))
        split = data.split or "train"
        if split not in names:
            has = f"it has {', '.join(names)}"
            raise UserError(f"{folder}: no split {split!r} ({has}): set data.split")
        yield from _files_below(folder / split, data)
    elif (folder / "state.json").is_file():
        for file in _saved(folder / "state.json", "_data_files"):
            yield folder / file["filename"]
    else:
        for path in sorted(folder.iterdir()):
            if path.name.startswith("."):
                continue
            if path.is_dir():
                yield from _files_below(path, data)
            else:
                yield path


def _saved(path: Path, key: str) -> Any:
    try:
        return read_json(path)[key]
    except (KeyError, TypeError):
        raise UserError(f"{path}: not as datasets saves it: save the dataset again") from None


def read_layout(path: Path, column: str, vocabulary: int) -> TokenLayout:
    """Return the layout of a token file, from its header, its index or its columns.

    Args:
        column: Column of the ids, in a file that `datasets` saved.
        vocabulary: Vocabulary size. It decides the width of tokens in a file that does not say it:
            16 bits if they are enough.

    Raises:
        UserError: The format is unknown, or the file is damaged.
    """
    if path.suffix == ".arrow":
        return _arrow(path, column)
    # the index is beside the link, or beside the file that the link leads to
    for file in (path, path.resolve()):
        if (index := file.with_suffix(".idx")).is_file() and path.suffix == ".bin":
            return _megatron(path, index)
        if (index := file.with_name(f"{file.name}.index")).is_file():
            return _refuse_halves(path, _datatrove(path, index))
    return _refuse_halves(path, _plain(path, "uint16" if vocabulary <= 1 << 16 else "uint32"))


def scan(path: Path, layout: TokenLayout, vocabulary: int, end: int) -> tuple[int, np.ndarray]:
    """Read all tokens once; return the largest token, and the ends of the documents in tokens.

    The end-of-text token follows each document. In a file that begins but does not end with it, it
    precedes each document.

    Raises:
        UserError: A token is not in the vocabulary.
    """
    largest, before = 0, 0
    end_positions = [np.empty(0, np.int64)]
    for array in map_ranges(path, layout.dtype, layout.ranges):
        for start in range(0, len(array), _CHUNK):
            part = array[start : start + _CHUNK]
            low, high = int(part.min()), int(part.max())
            if low < 0 or high >= vocabulary:
                raise UserError(
                    f"{path}: token {low if low < 0 else high}, but the vocabulary has "
                    f"{vocabulary}: set tokenize.tokenizer (or tokenize.vocabulary) to the one "
                    "that made the tokens"
                )
            largest = max(largest, high)
            if layout.ends is None:
                end_positions.append(np.flatnonzero(part == end) + before)
            before += len(part)
    if layout.ends is not None:
        return largest, layout.ends
    positions = np.concatenate(end_positions)
    begins = len(positions) > 0 and positions[0] == 0 and positions[-1] != before - 1
    ends = positions[1:] if begins else positions + 1
    open_end = before > 0 and (not len(ends) or ends[-1] != before)
    return largest, np.append(ends, before) if open_end else ends


def _plain(path: Path, dtype: str) -> TokenLayout:
    size = path.stat().st_size
    head = (*np.fromfile(path, "<i4", 3).tolist(), 0, 0, 0)[:3]
    start = 0
    if head[0] in {magic for magic, _ in _LLM_C} and head[:2] not in _LLM_C:
        raise UserError(
            f"{path}: a header of llm.c of unknown version {head[1]}: write the file with a known "
            f"version ({', '.join(str(version) for _, version in _LLM_C)})"
        )
    if head[:2] in _LLM_C:
        start, dtype = 1024, _LLM_C[head[:2]]
        if start + head[2] * np.dtype(dtype).itemsize != size:
            raise UserError(f"{path}: damaged: its header says {head[2]} tokens of {dtype}")
    count, remainder = divmod(size - start, np.dtype(dtype).itemsize)
    if remainder:
        raise UserError(
            f"{path}: damaged: its {size} bytes do not divide into {dtype} tokens: copy it again"
        )
    return TokenLayout(dtype, [[start, count]] if count else [], None)


def _refuse_halves(path: Path, layout: TokenLayout) -> TokenLayout:
    """Return a layout of 16 bits per token, a guess, unless the tokens seem to have 32 bits."""
    if layout.dtype == "uint16" and sum(count for _, count in layout.ranges) > 1:
        # the upper halves of small numbers of 32 bits are 0
        [first, *_] = map_ranges(path, layout.dtype, layout.ranges)
        if not first[1:_CHUNK:2].any():
            raise UserError(
                f"{path}: every second number of 16 bits is 0, so tokens have 32: write them as "
                "uint16, or give the index or the header that says so"
            )
    return layout


def _megatron(path: Path, index: Path) -> TokenLayout:
    raw = index.read_bytes()
    head = _MEGATRON.unpack_from(raw) if len(raw) >= _MEGATRON.size else (b"",) * 5
    magic, version, code, sequences, documents = head
    dtype = _MEGATRON_TYPES.get(code)
    if (magic, version) != (b"MMIDIDX\x00\x00", 1) or dtype is None:
        raise _mismatch(path, index)
    offset = _MEGATRON.size + 12 * sequences
    # an index of multimodal data has one more byte per sequence
    if len(raw) - offset - 8 * documents not in (0, sequences):
        raise _mismatch(path, index)
    lengths = np.frombuffer(raw, "<i4", sequences, _MEGATRON.size)
    pointers = np.frombuffer(raw, "<i8", sequences, _MEGATRON.size + 4 * sequences)
    bounds = np.frombuffer(raw, "<i8", documents, offset)
    edges = np.append(0, np.cumsum(lengths, dtype=np.int64))
    size = np.dtype(dtype).itemsize
    if not (
        (lengths >= 0).all()
        and edges[-1] * size == path.stat().st_size
        and np.array_equal(pointers, edges[:-1] * size)
        and len(bounds)
        and bounds[0] == 0
        and bounds[-1] == sequences
        and (np.diff(bounds) >= 0).all()
    ):
        raise _mismatch(path, index)
    return TokenLayout(dtype, [[0, int(edges[-1])]] if edges[-1] else [], edges[bounds[1:]])


def _datatrove(path: Path, index: Path) -> TokenLayout:
    ends, size = np.fromfile(index, "<i8"), path.stat().st_size
    count = int(ends[-1]) if len(ends) else 0
    width = size / count if count else 2 + size
    if width not in (2, 4) or (np.diff(ends, prepend=0) < 0).any():
        raise _mismatch(path, index)
    return TokenLayout(f"uint{int(8 * width)}", [[0, count]] if count else [], ends)


def _mismatch(path: Path, index: Path) -> UserError:
    return UserError(
        f"{index}: does not match {path.name}: give both files as they were written, with integers"
    )


def _arrow(path: Path, column: str) -> TokenLayout:
    """Return the ranges of the record batches; a row is a document."""
    try:
        import pyarrow as pa
    except ImportError:
        raise UserError(
            f"{path}: needs the datasets package: pip install 'shardlab[datasets]'"
        ) from None
    mapped = pa.memory_map(str(path)).read_buffer()
    dtype, ranges, lengths = "int64", [], [np.empty(0, np.int64)]
    try:
        for batch in pa.ipc.open_stream(mapped):
            names = batch.schema.names
            if column not in names:
                has = f"it has {', '.join(names)[:200]}"
                raise UserError(f"{path}: no column {column!r} ({has}): set data.ids_column")
            rows = batch.column(column)
            values = _ids(path, column, rows)
            dtype = str(np.dtype(values.type.to_pandas_dtype()))
            lengths.append(rows.value_lengths().to_numpy(zero_copy_only=False))
            if not len(values):
                continue
            start = values.buffers()[1].address - mapped.address
            if not 0 <= start <= mapped.size:
                raise UserError(f"{path}: packed record batches cannot be mapped: save it again")
            ranges.append([start + values.offset * values.type.bit_width // 8, len(values)])
    except (pa.ArrowInvalid, OSError) as error:
        reason = " ".join(str(error).split())[:100]
        raise UserError(f"{path}: not a file that datasets saved ({reason})") from None
    return TokenLayout(dtype, ranges, np.cumsum(np.concatenate(lengths)))


def _ids(path: Path, column: str, rows: Any) -> Any:
    """Return the ids of a column of lists, concatenated, without a copy."""
    from pyarrow import types

    list_types = types.is_list, types.is_large_list, types.is_fixed_size_list
    is_list = any(is_type(rows.type) for is_type in list_types)
    if not is_list or not types.is_integer(rows.type.value_type):
        raise UserError(
            f"{path}: column {column!r} holds {rows.type}, not lists of ids: set data.ids_column"
        )
    values = rows.flatten()
    if rows.null_count or values.null_count:
        raise UserError(
            f"{path}: column {column!r}: a row without ids, or an id that is null: leave it out"
        )
    return values
