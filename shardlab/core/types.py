"""Types of values in the settings of several packages."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from shardlab.core.document import AS_TUPLE

Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]*$", max_length=40)]
"""Name that becomes part of file names: lower-case letters, digits and hyphens."""
Seed = Annotated[int, Field(ge=0, lt=2**31)]
Positive = Annotated[float, Field(gt=0)]
# bounds beyond which a number is a mistake that would cost hours or all memory before it shows
WorldSize = Annotated[int, Field(ge=1, le=65_536)]
"""Number of ranks; the largest clusters have fewer GPUs than the limit."""
BatchSize = Annotated[int, Field(ge=1, le=2**20)]
SequenceLength = Annotated[int, Field(ge=2, le=2**24)]
Count = Annotated[int, Field(ge=1, le=10**9)]
"""Number of steps, repetitions or trials; a billion would take years."""
OptimizerName = Literal["adamw", "muon"]
_Beta = Annotated[float, Field(ge=0, lt=1)]
Betas = Annotated[tuple[_Beta, _Beta], AS_TUPLE]
"""Decay of the first and the second moment of AdamW, per step."""
Seconds = Annotated[float, Field(gt=0, le=10**7)]
"""Waiting time, at most four months; clocks of libraries overflow far above."""
Vocabulary = Annotated[int, Field(ge=1, le=2**31)]
"""Number of tokens of a model."""
