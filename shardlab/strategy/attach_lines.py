"""Strategies as lines of a training script."""

import json
from typing import Any

from shardlab.strategy.codec_table import codec_text
from shardlab.strategy.compression import written
from shardlab.strategy.document import CanonicalStrategy
from shardlab.strategy.sync import Sync


def attach_lines(strategy: CanonicalStrategy) -> str | None:
    """Return the call of `shardlab.attach` for the codecs and exchanges of a strategy, and what
    follows training with them; None where it has none."""
    gradients, weights, sync = strategy.gradients, strategy.weights, strategy.sync
    # the route of engines with messages of their own is no choice of a script
    chosen = strategy.traits.native_route and strategy.traits.residency != "streamed"
    given: dict[str, Any] = written(gradients) if chosen or not gradients.plain() else {}
    codec = given.pop("codec", "none")
    if codec != "none":
        given = {"gradients": codec, **given}
    if weights is not None:
        settings = written(weights)
        given["weights"] = settings.pop("codec")
        given |= {f"weights_{key}": value for key, value in settings.items()}
    texts = {key: _text(value) for key, value in given.items()}
    if sync is not None:
        default = Sync(every=sync.every).canonical()
        changed = {key for key, value in sync if value != getattr(default, key)}
        outer = sync.model_dump(mode="json", include=changed)
        coded = {"codec": codec_text(sync.codec)} if "codec" in outer else {}
        texts["sync_every"] = str(sync.every)
        if outer:
            texts["outer"] = repr(outer | coded)
        texts["optimizer"] = "optimizer"
    if not texts:
        return None
    arguments = ", ".join(f"{key}={text}" for key, text in texts.items())
    # without it replicas that synchronise rarely end unequal, and nothing would say so
    end = "" if sync is None else "\nhandle.synchronize()  # after the last step"
    return f"handle = shardlab.attach(model, {arguments}){end}"


def _text(value: object) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)
