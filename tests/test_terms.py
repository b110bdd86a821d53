"""Words that the project has replaced by the field's terms do not come back."""

import re
import subprocess

import pytest

from tests.pipeline.workspace import ROOT

REPLACED = {
    r"foret(ell|old)": "predict",
    r"learnt": "fit (a model), learned",
    r"\bby[ _]turns\b": "interleaved",
    r"nameless_?file|file without a name": "anonymous file, unlinked temporary file",
    r"\bmend(s|ed|ing)?\b": "fix",
    r"made anew": "regenerated",
    r"main memory": "host memory",
    r"\bon the processor\b": "on the CPU",
    r"(drawn|rounded|down) by chance": "stochastic rounding",
    r"right in the mean": "unbiased",
    r"legality": "validation",
    r"normal[ _]form": "canonical form",
    r"awaits the others": "acts as rendezvous host",
    r"endless rate": "asymptotic bandwidth",
    r"how soon how good": "time to quality",
    r"\"What moves\"": "traffic",
    r"what the codecs do": "codec statistics",
    r"tell_steps|\bTold\b": "register_step_hook, StepListener",
    r"when_gone": "add_finalizer",
    r"\blend(s|ing)?\b|\blent\b": "acquire, release",
    r"(timing|forecast)_?room": "section",
    r"nothing is tried|not tried yet": "no trial runs, untested",
    r"makes words up": "generates synthetic text",
    r"talks? over (nccl|gloo)": "use the backend",
    r"\btravel(s|led)? uncompressed": "is sent uncompressed",
    r"\b(landings|departures)\b": "gradient off-load",
    r"\btaken back\b": "rolled back",
}
"""patterns, without regard to case unless they hold a capital, and what to write"""

ALLOWED: dict[str, set[str]] = {
    "shardlab/forecast/results.py": {"learnt"},
    "tests/core/test_document.py": {"learnt"},
    "tests/test_terms.py": set(REPLACED),
}
"""patterns that a file may hold, because it quotes them or refuses an old key"""

CODE = (".c", ".cpp", ".h", ".html", ".j2", ".md", ".py", ".rst", ".smk", ".toml", ".yaml")


def texts() -> dict[str, str]:
    """Tracked code, documents and parameters, by path; not the log, nor results."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    return {
        path: (ROOT / path).read_text(encoding="utf-8")
        for path in listed
        if (path.endswith(CODE) or path in ("Makefile", "Snakefile"))
        and path != "docs/LOG.md"
        and not path.startswith("results/")
        and (ROOT / path).is_file()
    }


TEXTS = texts()


@pytest.mark.parametrize("pattern", REPLACED)
def test_replaced_words_do_not_come_back(pattern: str) -> None:
    flags = 0 if re.search(r"[A-Z]", pattern) else re.IGNORECASE
    found = [
        f"{path}:{number}: {line.strip()}"
        for path, text in TEXTS.items()
        if pattern not in ALLOWED.get(path, ())
        for number, line in enumerate(text.splitlines(), 1)
        if re.search(pattern, line, flags)
    ]
    assert not found, f"write {REPLACED[pattern]!r}:\n" + "\n".join(found)
