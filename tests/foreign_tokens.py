"""Token files by the published layouts of other programs; `python -m tests.foreign_tokens` writes
tests/data/golden_tokens/ by datatrove and Megatron themselves, where they are installed."""

import struct
import sys
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np

Documents = Sequence[Sequence[int]]
GOLDEN = Path(__file__).parent / "data/golden_tokens"
DOCUMENTS = [[5, 6, 7, 0], [8, 0], [9, 10, 11, 12, 13, 0]]
"""the documents of the golden files; 0 is the end of text"""


def flat(documents: Documents) -> list[int]:
    return [token for document in documents for token in document]


def nanogpt(folder: Path, documents: Documents) -> Path:
    """As data/openwebtext/prepare.py of karpathy/nanoGPT: uint16, no header."""
    path = folder / "train.bin"
    np.array(flat(documents), np.uint16).tofile(path)
    return path


def llmc(folder: Path, documents: Documents, magic: int = 20240520, version: int = 1) -> Path:
    """As dev/data/data_common.py of karpathy/llm.c, and modded-nanogpt: 256 int32 of header."""
    path = folder / "fineweb_train_000001.bin"
    tokens = flat(documents)
    header = np.zeros(256, np.int32)
    header[:3] = magic, version, len(tokens)
    dtype = np.uint16 if version == 1 else np.uint32
    path.write_bytes(header.tobytes() + np.array(tokens, dtype).tobytes())
    return path


def llama3(folder: Path, documents: Documents) -> Path:
    return llmc(folder, documents, 20240801, 7)


def megatron(folder: Path, documents: Documents, dtype: str = "uint16") -> Path:
    """As megatron/core/datasets/indexed_dataset.py: one sequence for each document."""
    path = folder / "text_document.bin"
    lengths = [len(document) for document in documents]
    size = np.dtype(dtype).itemsize
    code = {"int32": 4, "uint16": 8}[dtype]
    parts = [
        b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(lengths), len(lengths) + 1),
        np.array(lengths, np.int32).tobytes(),
        (np.cumsum([0, *lengths[:-1]]) * size).astype(np.int64).tobytes(),
        np.arange(len(lengths) + 1, dtype=np.int64).tobytes(),
    ]
    path.with_suffix(".idx").write_bytes(b"".join(parts))
    np.array(flat(documents), dtype).tofile(path)
    return path


def datatrove(folder: Path, documents: Documents, dtype: str = "uint16") -> Path:
    """As datatrove/pipeline/tokens/tokenizer.py: the index holds the ends of documents."""
    path = folder / "00000_00000_doc_shuffled.ds"
    np.array(flat(documents), dtype).tofile(path)
    ends = list(accumulate(map(len, documents)))
    path.with_name(f"{path.name}.index").write_bytes(struct.pack(f"<{len(ends)}Q", *ends))
    return path


def saved_dataset(folder: Path, documents: Documents) -> Path:
    """By the datasets package itself, in several files and record batches."""
    import datasets

    path = folder / "saved"
    column = datasets.Dataset.from_dict({"input_ids": documents, "other": [1] * len(documents)})
    column.save_to_disk(str(path), num_shards=min(3, len(documents)))
    return path


WRITERS: dict[str, Callable[[Path, Documents], Path]] = {
    writer.__name__: writer
    for writer in (nanogpt, llmc, llama3, megatron, datatrove, saved_dataset)
}


def _write_golden() -> None:
    from datatrove.pipeline.tokens.tokenizer import TokenizedFile
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    GOLDEN.mkdir(exist_ok=True)
    file = TokenizedFile(str(GOLDEN), "golden.ds")
    for document in DOCUMENTS:
        file.write(document, None)
    file.close()
    import torch

    builder = IndexedDatasetBuilder(str(GOLDEN / "golden.bin"), np.uint16)
    for document in DOCUMENTS:
        builder.add_document(torch.tensor(document), [len(document)])
    builder.finalize(str(GOLDEN / "golden.idx"))


if __name__ == "__main__":
    sys.exit(_write_golden())
