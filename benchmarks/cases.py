"""The codecs that the benchmarks try, with the earlier figures that stand beside the new ones."""

from collections.abc import Sequence
from pathlib import Path

import yaml

from shardlab.codecs.base import Codec
from shardlab.codecs.multi_phase import MultiPhaseMethod
from shardlab.codecs.registry import make_method
from shardlab.core.document import Document, validate
from shardlab.core.errors import UserError
from shardlab.strategy.codec_options import MULTI_PHASE

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
        """Of the codec, without options."""
        return self.spec.partition(":")[0]

    @property
    def multi_phase(self) -> bool:
        """Whether the method takes several phases of messages instead of one payload."""
        return self.name in MULTI_PHASE

    def method(self) -> Codec | MultiPhaseMethod:
        """A new codec, or a multi-phase method without state."""
        return make_method(self.spec)


def cases(only: Sequence[str] = ()) -> list[Case]:
    """All cases, or those whose spec or name is in `only`; every one of them can be made.

    Raises:
        UserError: a name that fits no case, or a codec that does not exist.
    """
    entries = yaml.safe_load(_FILE.read_text(encoding="utf-8"))
    known = [validate(Case, _with_tuples(entry), _FILE.name) for entry in entries]
    for word in only:
        if not any(word in (case.spec, case.name) for case in known):
            raise UserError(f"{word!r} is in no case of {_FILE.name}")
    chosen = [case for case in known if not only or {case.spec, case.name} & set(only)]
    for case in chosen:
        case.method()
    return chosen


def _with_tuples(entry: dict[str, object]) -> dict[str, object]:
    """YAML has lists where a frozen document has tuples."""
    return {key: tuple(v) if isinstance(v, list) else v for key, v in entry.items()}
