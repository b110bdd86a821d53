from pathlib import Path

# where `--directory` leads: commands and rules look for these beside params.yaml
if not Path("stages").is_dir():
    raise SystemExit(
        f"{Path.cwd()}: no folder of experiments: shardlab init DIR or make experiments/NAME "
        "PARAMS=FILE makes one, and shardlab init . the links of a clone"
    )

from shardlab.config.parameters import Parameters
from shardlab.core.errors import UserError
from stages.code import code_keys
from stages.inputs import content_of
from stages.params import parameter_keys

# SystemExit: Snakemake shows its own exceptions with the place in this file, which is not the mistake
try:
    PARAMETERS = Parameters("params.yaml").complete()
    VALUES = parameter_keys(PARAMETERS)
    # digests of the code that each stage imports, as in data/code.yaml
    CODE = code_keys(PARAMETERS)
except UserError as error:
    mistakes = str(error).split("\n")
    raise SystemExit(
        "\n".join(f"params.yaml: {line.removeprefix('params.yaml: ')}" for line in mistakes)
    ) from None
