"""A strategy: one frozen document that says how a model is sharded, wrapped and compressed.

Everything that can be tuned is here, and nothing that can be tuned is elsewhere. Two documents of
equal meaning have equal normal forms and so equal hashes.
"""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from shardlab.core.codec_options import IN_ROUNDS, SPARSE, SUMMABLE, NoneSpec, RandomKSpec
from shardlab.core.codec_spec import CodecSpec, codec_text
from shardlab.core.document import Document, validate
from shardlab.core.files import sha256_of_value


class Compression(Document):
    """How the gradients travel."""

    codec: CodecSpec = NoneSpec()
    route: Literal["native", "exchange"] | None = None
    """native: the process group's own collective, whose payloads are summed on the wire (only
    `none` and codecs whose payloads can be summed); exchange: all-to-all of payloads, decoded and
    summed by the owner. Default: native for `none`, exchange for the others."""
    error_feedback: bool = False
    """what was not sent is added to the next vector of the same unit"""
    residual: Literal["fp32", "bf16", "int8"] = "fp32"
    """how error feedback stores what was not sent"""
    minimum_size: int = Field(1024, ge=0)
    """messages with fewer elements travel uncompressed"""
    exclude: tuple[str, ...] = ()
    """parameters whose name matches one of these patterns (`*.bias`) travel uncompressed"""
    warmup_steps: int = Field(0, ge=0)
    """steps at the start that travel uncompressed"""
    between_nodes: CodecSpec | None = None
    """codec of the second of two levels, between nodes; `codec` then serves inside a node"""
    ranks_per_node: int | None = Field(None, ge=2)
    """size of a node, where `between_nodes` is given; default: the launcher's"""

    @model_validator(mode="before")
    @classmethod
    def _lists(cls, value: Any) -> Any:
        """YAML and JSON have lists where a frozen document has tuples."""
        if isinstance(value, dict) and isinstance(value.get("exclude"), list):
            return {**value, "exclude": tuple(value["exclude"])}
        return value

    @model_validator(mode="after")
    def _check(self) -> Self:
        name = self.codec.name
        if name == "none" and self.error_feedback:
            raise ValueError("error_feedback is pointless with codec 'none': nothing is lost")
        if isinstance(self.codec, RandomKSpec) and self.error_feedback and self.codec.scaled:
            raise ValueError("scaled: true diverges with error_feedback: remove one of them")
        if self.route == "native" and name not in SUMMABLE:
            raise ValueError(f"codec {name!r} cannot be summed on the wire: use route: exchange")
        if self.residual != "fp32" and not self.error_feedback:
            raise ValueError("residual has no meaning without error_feedback: remove it")
        if self.ranks_per_node is not None and self.between_nodes is None:
            raise ValueError("ranks_per_node has no meaning without between_nodes: remove it")
        for level in (self.codec, self.between_nodes):
            if self.between_nodes is not None and level is not None and level.name in IN_ROUNDS:
                raise ValueError(
                    f"codec {level.name!r} has no two-level form: remove between_nodes"
                )
        return self

    def plain(self) -> bool:
        """Whether nothing is compressed, neither inside a node nor between nodes."""
        return self.codec.name == "none" and self.between_nodes is None

    def normal(self) -> "Compression":
        """Defaults written out; options that change nothing reset."""
        plain = self.plain()
        updates: dict[str, Any] = {"route": self.route or ("native" if plain else "exchange")}
        if plain:
            updates |= {"minimum_size": 0, "exclude": (), "warmup_steps": 0}
        return self.model_copy(update=updates)


class WeightCompression(Document):
    """How the parameters travel when they are gathered."""

    codec: CodecSpec = NoneSpec()
    minimum_size: int = Field(1024, ge=0)
    """messages with fewer elements travel uncompressed"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.codec.name in IN_ROUNDS or self.codec.name in SPARSE:
            raise ValueError(
                f"codec {self.codec.name!r} is for gradients: weights need every element"
            )
        return self

    def normal(self) -> "WeightCompression | None":
        """None where nothing is compressed."""
        return None if self.codec.name == "none" else self


_DEPTH = {"fsdp2": 0, "manual": 1}
"""units that are gathered ahead, where nobody says how many"""


class Strategy(Document):
    """How a model is trained on several ranks."""

    engine: Literal["ddp", "fsdp2", "manual"] = "fsdp2"
    wrap: Literal["block", "root"] | None = None
    """fsdp2, manual: one unit per transformer block (default) or one for the whole model"""
    reshard_after_forward: bool | None = None
    """fsdp2, manual: free gathered parameters after forward (default) or keep them for backward"""
    prefetch: int | None = Field(None, ge=0)
    """fsdp2, manual: units that are gathered ahead of their use; from 1 on communication also runs
    beside computation on devices without streams (default: 1 for manual, 0 for fsdp2)"""
    bucket_mb: float | None = Field(None, gt=0)
    """ddp: size of a gradient bucket in MiB (default 25)"""
    gradients: Compression = Compression()
    weights: WeightCompression | None = None
    """fsdp2, manual: how gathered parameters travel (default: as they are)"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        sharded = ("bucket_mb",)
        foreign = {
            "ddp": ("wrap", "reshard_after_forward", "prefetch", "weights"),
            "fsdp2": sharded,
            "manual": sharded,
        }[self.engine]
        for key in foreign:
            if getattr(self, key) is not None:
                raise ValueError(f"{key} has no meaning for engine {self.engine!r}: remove it")
        if self.wrap == "root" and self.reshard_after_forward:
            raise ValueError(
                "reshard_after_forward: true is pointless with wrap: root, where backward follows "
                "forward at once: remove one of them"
            )
        return self

    def normal(self) -> "Strategy":
        """The same meaning with every default written out."""
        updates: dict[str, Any] = {"gradients": self.gradients.normal()}
        if self.engine == "ddp":
            updates["bucket_mb"] = float(self.bucket_mb or 25)
        else:
            wrap = self.wrap or "block"
            reshard = self.reshard_after_forward
            updates["wrap"] = wrap
            updates["reshard_after_forward"] = wrap == "block" if reshard is None else reshard
            updates["prefetch"] = self._depth()
            updates["weights"] = self.weights.normal() if self.weights else None
        if self.engine == "manual" and self.gradients.route is None:
            updates["gradients"] = self.gradients.model_copy(update={"route": "exchange"}).normal()
        return self.model_copy(update=updates)

    def _depth(self) -> int | None:
        """None for what torch does by itself."""
        if self.engine == "manual":
            return _DEPTH["manual"] if self.prefetch is None else self.prefetch
        return self.prefetch or None

    def hash(self) -> str:
        """16 hexadecimal digits; equal for equal meanings."""
        return sha256_of_value(_meaning(self.normal()))[:16]

    def brief(self) -> str:
        """The strategy in a few words, for tables and prompts; different for different meanings.

        A codec's first option is always named, all else only where it is not the default.
        """
        full = self.normal()
        words = [full.engine, *_gradient_words(full.gradients)]
        if full.weights is not None:
            words.append(f"weights {codec_text(full.weights.codec)}{_from_size(full.weights)}")
        if full.engine == "ddp" and full.bucket_mb != 25:
            words.append(f"buckets of {repr(full.bucket_mb).removesuffix('.0')} MiB")
        if full.wrap == "root":
            words.append("one unit")
        if full.wrap == "block" and not full.reshard_after_forward:
            words.append("kept after forward")
        if full.prefetch is not None and full.prefetch != _DEPTH[full.engine]:
            words.append(f"{full.prefetch} units ahead")
        return ", ".join(words)


def _gradient_words(normal: Compression) -> list[str]:
    words = [codec_text(normal.codec)]
    if normal.between_nodes is not None:
        nodes = "nodes"
        if normal.ranks_per_node is not None:
            nodes = f"nodes of {normal.ranks_per_node} ranks"
        words.append(f"{codec_text(normal.between_nodes)} between {nodes}")
    if normal.plain():
        return words + (["exchange"] if normal.route == "exchange" else [])
    words[-1] += _from_size(normal)
    if normal.error_feedback:
        kept = "" if normal.residual == "fp32" else f" in {normal.residual}"
        words.append(f"error feedback{kept}")
    if normal.route == "native":
        words.append("summed on the wire")
    if normal.exclude:
        words.append(f"without {' '.join(normal.exclude)}")
    if normal.warmup_steps:
        words.append(f"after {normal.warmup_steps} steps")
    return words


def _from_size(normal: Compression | WeightCompression) -> str:
    default = type(normal).model_fields["minimum_size"].default
    size = normal.minimum_size
    return "" if size == default else f" from {size} elements"


def _meaning(document: Document) -> dict[str, Any]:
    """Plain data without defaults: an option that comes later leaves the hashes as they are."""
    meaning: dict[str, Any] = {}
    for key, field in type(document).model_fields.items():
        value = getattr(document, key)
        if key == "name" or value != field.default:
            meaning[key] = _meaning(value) if isinstance(value, Document) else value
    return meaning


def parse_strategy(value: Any, where: str = "strategy") -> Strategy:
    """A strategy from plain data.

    Raises:
        UserError: the key, what was expected and the mend.
    """
    return validate(Strategy, value, where)
