from shardlab.core.errors import UserError
from shardlab.config.parameters import Parameters
from shardlab.config.schema import Params
from stages.content import content_of
from stages.outside import contents_read, inputs_of_stages
from stages.plans import plans

# SystemExit: Snakemake shows its own exceptions with the place in this file, which is not the mistake
try:
    PARAMETERS = Parameters("params.yaml")
    PARAMETERS(*Params.model_fields)
    PLANS = plans(PARAMETERS)
    CONTENTS = {name: content_of(PARAMETERS, name).sha256 for name in PARAMETERS("inputs")}
    READ = contents_read(inputs_of_stages(PARAMETERS), CONTENTS)
except UserError as error:
    raise SystemExit(f"params.yaml: {str(error).removeprefix('params.yaml: ')}") from None
