"""Validate params.yaml as a whole, before a name in it becomes part of a command or a path.

DVC removes the outputs of a stage before it runs it, whatever their names: the stages with names
come after this one. Snakemake validates the parameters while it reads the Snakefile, too.
"""

from shardlab.core.files import write_text
from shardlab.experiment.parameters import Parameters
from shardlab.experiment.schema import Params
from stages.common import run


def main(params: Parameters) -> None:
    """Write data/parameters.ok, the same for all parameters: what follows is not repeated."""
    params(*Params.model_fields)
    write_text("data/parameters.ok", "params.yaml is valid\n")


if __name__ == "__main__":
    run(main)
