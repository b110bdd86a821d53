"""Settings of the compression of gradients and of gathered parameters."""

import math
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from shardlab.core.document import AS_TUPLE, Document
from shardlab.core.numbers import plural
from shardlab.strategy.codec_options import CodecSpec, NoneSpec
from shardlab.strategy.codec_table import AnyCodec, codec_text

RouteName = Literal["native", "exchange"]


def left_out(
    codec: CodecSpec, error_feedback: bool, messages: int | None, occasion: str, what: str
) -> str | None:
    """Return a sentence on the elements that a run sends never, or None where it may send all.

    A message holds at most a fraction d of the elements, so that T messages send at most T d of
    them, even where each is another: below 1 the rest never moves its parameter. Error feedback
    keeps them for later messages, which a run so short does not have.

    Args:
        messages: of a unit in the run; None: unknown.
        occasion: what has a message, in words.
        what: is sent, in words.
    """
    sent, text = codec.most_sent(), codec_text(codec)
    if sent == 1 or (error_feedback and messages is None):
        return None
    fix = "set warmup_steps and error_feedback, or raise the density"
    if messages is None:
        few = f"fewer than {plural(math.ceil(1 / sent), occasion)} cannot send all {what}"
        return f"{text} drops what it does not send: {few}: {fix}"
    if messages * sent >= 1:
        return None
    share = f"{100 * messages * sent:.2g} %"
    return f"{text} sends at most {share} of the {what} in {plural(messages, occasion)}: {fix}"


def changed_settings(document: Document, default: Document, *always: str) -> dict[str, Any]:
    """Return as plain data the settings that are not the default, and `always`; codecs as text."""
    plain = document.model_dump(mode="json")
    return {
        key: codec_text(value) if isinstance(value, CodecSpec) else plain[key]
        for key, value in document
        if key in always or value != getattr(default, key)
    }


class Compression(Document):
    """Compression of the gradients."""

    codec: AnyCodec = NoneSpec()
    """of the messages: a name with options, or a mapping"""
    route: RouteName | None = None
    """native: the process group's own collective, for `none` alone; exchange: all-to-all of
    payloads, decoded and summed by the owner. Default: native for `none`, exchange for others."""
    error_feedback: bool = False
    """add what was not sent to the next vector of the same unit"""
    residual: Literal["fp32", "bf16", "int8"] = "fp32"
    """type in which error feedback stores what was not sent"""
    decay: float = Field(1.0, gt=0, le=1)
    """factor of what was not sent, from one message to the next (0.95 in SparseLoCo)"""
    minimum_size: int = Field(1024, ge=0)
    """messages with fewer elements are sent uncompressed"""
    exclude: Annotated[tuple[str, ...], AS_TUPLE] = ()
    """parameters whose name matches one of these patterns (`*.bias`) are sent uncompressed"""
    warmup_steps: int = Field(0, ge=0)
    """steps at the start that are sent uncompressed"""
    between_nodes: AnyCodec | None = None
    """codec of the second of two levels, between nodes; `codec` then compresses inside a node"""
    ranks_per_node: int | None = Field(None, ge=2)
    """number of ranks of a node, with `between_nodes` (default: the launcher's)"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        name = self.codec.name
        if name == "none" and self.error_feedback:
            raise ValueError("error_feedback is pointless with codec 'none': nothing is lost")
        conflict = self.codec.feedback_conflict()
        if self.error_feedback and conflict:
            raise ValueError(conflict)
        if self.route == "native" and not self.plain():
            raise ValueError("route: native is for codec 'none' alone: use route: exchange")
        if self.residual != "fp32" and not self.error_feedback:
            raise ValueError("residual does nothing without error_feedback: remove it")
        if self.decay != 1 and not self.error_feedback:
            raise ValueError("decay does nothing without error_feedback: remove it")
        if self.ranks_per_node is not None and self.between_nodes is None:
            raise ValueError("ranks_per_node does nothing without between_nodes: remove it")
        for level in (self.codec, self.between_nodes):
            if self.between_nodes is not None and level is not None and level.multi_phase:
                raise ValueError(
                    f"codec {level.name!r} has no two-level form: remove between_nodes"
                )
        return self

    def left_out(self, steps: int | None = None) -> str | None:
        """Return a sentence on the gradients that a run sends never, or None where it may send all.

        Args:
            steps: of the run; None: unknown.
        """
        if self.warmup_steps:
            return None
        return left_out(self.codec, self.error_feedback, steps, "step", "gradients")

    def plain(self) -> bool:
        """Return whether nothing is compressed, neither inside a node nor between nodes."""
        return self.codec.name == "none" and self.between_nodes is None

    def canonical(self, default_route: RouteName | None = None) -> "CanonicalCompression":
        """Write defaults out and reset options that change nothing.

        Args:
            default_route: of the engine; None: native where nothing is compressed.
        """
        plain = self.plain()
        values = {name: getattr(self, name) for name in type(self).model_fields}
        values["route"] = self.route or default_route or ("native" if plain else "exchange")
        if plain:
            values |= {"minimum_size": 0, "exclude": (), "warmup_steps": 0}
        return CanonicalCompression.model_construct(**values)


class CanonicalCompression(Compression):
    """Canonical form of the compression of gradients."""

    route: RouteName

    def written(self) -> dict[str, Any]:
        """Return this as plain data, with the codec and without defaults."""
        levels = Compression(codec=self.codec, between_nodes=self.between_nodes)
        default = levels.canonical().model_copy(update={"between_nodes": None})
        return changed_settings(self, default, "codec")


def _for_weights(codec: CodecSpec) -> CodecSpec:
    if codec.multi_phase or codec.sparse:
        raise ValueError(f"codec {codec.name!r} is for gradients: weights need every element")
    return codec


WeightCodec = Annotated[AnyCodec, AfterValidator(_for_weights)]
"""a field that holds a codec of gathered parameters"""


class WeightCompression(Document):
    """Compression of the parameters when they are gathered."""

    codec: WeightCodec = NoneSpec()
    """of the messages: a name with options, or a mapping"""
    minimum_size: int = Field(1024, ge=0)
    """messages with fewer elements are sent uncompressed"""

    def written(self) -> dict[str, Any]:
        """Return this as plain data, with the codec and without defaults."""
        return changed_settings(self, WeightCompression(), "codec")

    def canonical(self) -> "WeightCompression | None":
        """Return this, or None where nothing is compressed."""
        return None if self.codec.name == "none" else self


def _around_codec(value: Any) -> Any:
    """Return the mapping that a codec alone stands for, such as `"int8:group=64"`."""
    is_mapping = isinstance(value, dict | Document) and not isinstance(value, CodecSpec)
    return value if is_mapping else {"codec": value}


Gradients = Annotated[
    Compression,
    BeforeValidator(_around_codec, json_schema_input_type=Compression | str),
]
"""a field that holds the compression of gradients, or their codec alone"""
Weights = Annotated[
    WeightCompression,
    BeforeValidator(_around_codec, json_schema_input_type=WeightCompression | str),
]
"""a field that holds the compression of gathered parameters, or their codec alone"""


def setting_words(document: Document, default: Document, *keys: str) -> list[str]:
    """Return `key=value` for each of these settings that is not the default."""
    return [
        _setting_word(key, getattr(document, key))
        for key in keys
        if getattr(document, key) not in (None, getattr(default, key, None))
    ]


def _setting_word(key: str, value: Any) -> str:
    if isinstance(value, Document) and not isinstance(value, CodecSpec):
        blank = type(value).model_construct()
        return f"{key}({' '.join(setting_words(value, blank, *type(value).model_fields))})"
    match value:
        case True:
            return key
        case False:
            return f"{key}=false"
        case CodecSpec():
            return f"{key}={codec_text(value)}"
        case tuple():
            return f"{key}={' '.join(value)}"
    return f"{key}={value}"


def gradient_words(canonical: Compression) -> list[str]:
    """Return the codec and the settings that are not the default, of a canonical form."""
    nodes = canonical.between_nodes
    default = Compression(codec=canonical.codec, between_nodes=nodes).canonical()
    between = [] if nodes is None else [f"between_nodes={codec_text(nodes)}"]
    others = [key for key in Compression.model_fields if key not in ("codec", "between_nodes")]
    return [codec_text(canonical.codec), *between, *setting_words(canonical, default, *others)]


def weight_words(canonical: WeightCompression) -> str:
    """Return the codec and the settings that are not the default, of a canonical form."""
    words = setting_words(canonical, WeightCompression(), "minimum_size")
    return " ".join([f"weights={codec_text(canonical.codec)}", *words])
