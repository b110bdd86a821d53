"""Network namespaces, and the processes that hold them."""

from contextlib import suppress
from pathlib import Path


def target(link):
    """Target of the link, if it is still there: processes come and go."""
    with suppress(OSError):
        return str(link.readlink())
    return ""


def held(namespaces):
    """Those of the namespaces to which some process refers."""
    processes = Path("/proc")
    links = [*processes.glob("[0-9]*/ns/net"), *processes.glob("[0-9]*/fd/*")]
    return namespaces & set(map(target, links))
