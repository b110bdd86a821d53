"""A strategy: one frozen document that says how a model is sharded, wrapped and compressed.

Everything that can be tuned is here, and nothing that can be tuned is elsewhere. Two documents of
equal meaning have equal normal forms and so equal hashes.
"""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from shardlab.core.codec_spec import CodecSpec, NoneSpec
from shardlab.core.document import Document, validate
from shardlab.core.files import sha256_of_value


class Compression(Document):
    """How the messages of one kind (gradients) travel."""

    codec: CodecSpec = NoneSpec()
    route: Literal["native", "exchange"] | None = None
    """native: the process group's own collective, whose payloads are summed on the wire (only
    `none`); exchange: all-to-all of payloads, decoded and summed by the owner. Default: native for
    `none`, exchange for the others."""
    error_feedback: bool = False
    """what was not sent is added to the next vector of the same unit"""
    minimum_size: int = Field(1024, ge=0)
    """messages with fewer elements travel uncompressed"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.codec.name == "none" and self.error_feedback:
            raise ValueError("error_feedback is pointless with codec 'none': nothing is lost")
        if self.codec.name != "none" and self.route == "native":
            raise ValueError(
                f"codec {self.codec.name!r} cannot be summed on the wire: use route: exchange"
            )
        return self

    def normal(self) -> "Compression":
        """Defaults written out; options that change nothing reset."""
        plain = self.codec.name == "none"
        return self.model_copy(
            update={
                "route": self.route or ("native" if plain else "exchange"),
                "minimum_size": 0 if plain else self.minimum_size,
            }
        )


class Strategy(Document):
    """How a model is trained on several ranks."""

    engine: Literal["ddp", "fsdp2"] = "fsdp2"
    wrap: Literal["block", "root"] | None = None
    """fsdp2: one unit per transformer block (default) or one for the whole model"""
    reshard_after_forward: bool | None = None
    """fsdp2: free the gathered parameters after forward (default) or keep them for backward"""
    bucket_mb: float | None = Field(None, gt=0)
    """ddp: size of a gradient bucket in MiB (default 25)"""
    gradients: Compression = Compression()

    @model_validator(mode="after")
    def _check(self) -> Self:
        foreign = {"ddp": ("wrap", "reshard_after_forward"), "fsdp2": ("bucket_mb",)}[self.engine]
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
        return self.model_copy(update=updates)

    def hash(self) -> str:
        """16 hexadecimal digits; equal for equal meanings."""
        return sha256_of_value(self.normal().model_dump(mode="json"))[:16]

    def brief(self) -> str:
        """The strategy in a few words, for tables and prompts."""
        full, given = self.normal(), self.gradients.codec
        options = ",".join(f"{k}={v}" for k, v in given.model_dump().items() if k != "name")
        words = [full.engine, given.name + (f":{options}" if options else "")]
        if full.gradients.error_feedback:
            words.append("error feedback")
        if given.name == "none" and full.gradients.route == "exchange":
            words.append("exchange")
        if full.engine == "ddp" and full.bucket_mb != 25:
            words.append(f"buckets of {full.bucket_mb:g} MiB")
        if full.engine == "fsdp2" and full.wrap == "root":
            words.append("one unit")
        if full.engine == "fsdp2" and full.wrap == "block" and not full.reshard_after_forward:
            words.append("kept after forward")
        return ", ".join(words)


def parse_strategy(value: Any, where: str = "strategy") -> Strategy:
    """A strategy from plain data.

    Raises:
        UserError: the key, what was expected and the mend.
    """
    return validate(Strategy, value, where)
