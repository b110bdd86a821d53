"""Downloads of text files by their address."""

from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

import requests

from shardlab.core.errors import UserError
from shardlab.core.files import atomic, sha256_of_value
from shardlab.core.progress import say
from shardlab.data.local_files import PACKED

_CHUNK = 1 << 20
_TIMEOUT_S = 60
"""Seconds without data after which a download fails."""
_AS_IT_IS = {"Accept-Encoding": "identity"}


def is_address(path: str) -> bool:
    """Return whether a path is the address of a file on a server."""
    return path.startswith(("http://", "https://"))


def download(address: str, work: Path) -> Path:
    """Return the file in `work/downloads`, downloaded if it is missing.

    Raises:
        UserError: The file cannot be downloaded.
    """
    try:
        name = PurePosixPath(unquote(urlsplit(address).path)).name or "file"
        path = work / "downloads" / sha256_of_value(address)[:16] / name
        if not path.is_file():
            say(f"downloading {address}")
            _fetch(address, path)
    except UserError:
        raise
    # ValueError: urlsplit raises it for "http://["
    except (requests.RequestException, ValueError) as error:
        reply = getattr(error, "response", None)
        reason = type(error).__name__ if reply is None else f"status {reply.status_code}"
        raise UserError(
            f"data.path {address!r}: cannot be downloaded ({reason}): check it, or download the "
            "file and give its path"
        ) from None
    return path


def _fetch(address: str, path: Path) -> None:
    with requests.get(address, stream=True, timeout=_TIMEOUT_S, headers=_AS_IT_IS) as response:
        response.raise_for_status()
        if path.suffix in PACKED:
            # some servers declare the packing of the file as an encoding: its reader unpacks it
            response.raw.headers.pop("Content-Encoding", None)
        with atomic(path) as temporary, temporary.open("wb") as file:
            for chunk in response.iter_content(_CHUNK):
                file.write(chunk)
