from shardlab.core.errors import UserError
from shardlab.experiment.parameters import Parameters
from shardlab.experiment.schema import Params

# SystemExit: Snakemake shows its own exceptions with the place in this file, which is not the mistake
try:
    Parameters("params.yaml")(*Params.model_fields)
except UserError as error:
    raise SystemExit(f"params.yaml: {str(error).removeprefix('params.yaml: ')}") from None
