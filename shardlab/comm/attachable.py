"""Models of our own making that take collectives."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch.distributed as dist

from shardlab.comm.collective import Collective

MakeCollective = Callable[[dist.ProcessGroup], Collective]


class Attachable(ABC):
    """A module that `attach` can serve without knowing it."""

    @abstractmethod
    def attach_collectives(
        self, gradients: MakeCollective, weights: MakeCollective, replicas: MakeCollective
    ) -> Callable[[], None]:
        """Takes the collectives of its process groups; returns a function that takes them out.

        Args:
            replicas: of gradients, between copies of the model.
        """

    @abstractmethod
    def unit_names(self) -> dict[str, list[str]]:
        """The names of the parameters of each unit, which travel as one flat vector."""
