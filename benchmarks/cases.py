"""The codecs that the benchmarks run, with earlier figures to compare with."""

from collections.abc import Sequence
from pathlib import Path

import yaml

from shardlab.codecs.multi_phase import Method
from shardlab.codecs.registry import make_method, spec_of
from shardlab.config.codec_table import all_specs
from shardlab.core.document import Document, validate
from shardlab.core.errors import UserError

_FILE = Path(__file__).with_name("codecs.yaml")


class Case(Document):
    """One entry of codecs.yaml; None where there is no earlier figure."""

    spec: str
    bits: float | None = None
    error: tuple[float | None, float, float, float] | None = None
    cumulative: tuple[float, float] | None = None
    encode: float | None = None
    decode: float | None = None
    magnitude: bool = True

    @property
    def name(self) -> str:
        """Name of the codec, without options."""
        return self.spec.partition(":")[0]

    @property
    def multi_phase(self) -> bool:
        """Return whether the method sums in several phases instead of one payload per message."""
        return spec_of(self.spec).multi_phase

    def method(self) -> Method:
        """Return a new codec, or a method of several phases without state."""
        return make_method(self.spec)


def cases(only: Sequence[str] = ()) -> list[Case]:
    """Return all cases, or those whose spec or name is in `only`; every one of them can be made.

    Codecs of the table that codecs.yaml does not list, among them those of users, follow with the
    first of their examples, or without options.

    Raises:
        UserError: a name that fits no case, or a codec that does not exist.
    """
    entries = yaml.safe_load(_FILE.read_text(encoding="utf-8"))
    known = [validate(Case, _with_tuples(entry), _FILE.name) for entry in entries]
    listed = {case.name for case in known}
    known += [
        Case(spec=next(iter(spec.examples), name))
        for name, spec in all_specs().items()
        if name not in listed
    ]
    for word in only:
        if not any(word in (case.spec, case.name) for case in known):
            raise UserError(f"{word!r} is no codec and no spec of {_FILE.name}")
    chosen = [case for case in known if not only or {case.spec, case.name} & set(only)]
    for case in chosen:
        case.method()
    return chosen


def _with_tuples(entry: dict[str, object]) -> dict[str, object]:
    """Return the entry with tuples, as frozen documents have them, where YAML has lists."""
    return {key: tuple(v) if isinstance(v, list) else v for key, v in entry.items()}
