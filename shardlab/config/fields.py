"""Types of values in `params.yaml`, with their bounds."""

from typing import Annotated

from pydantic import Field, StringConstraints

Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]*$", max_length=40)]
"""Name that becomes part of file names: lower-case letters, digits and hyphens."""
Round = Annotated[str, StringConstraints(pattern=r"^[1-9][0-9]*$")]
Seed = Annotated[int, Field(ge=0, lt=2**31)]
Positive = Annotated[float, Field(gt=0)]
# bounds beyond which a number is a mistake that would cost hours or all memory before it shows
WorldSize = Annotated[int, Field(ge=1, le=65_536)]
"""more ranks than the largest clusters have GPUs are no run"""
Count = Annotated[int, Field(ge=1, le=10**9)]
"""a billion steps, repetitions or trials take years"""
Seconds = Annotated[float, Field(gt=0, le=10**7)]
"""waiting times: four months; clocks of libraries overflow far above"""
