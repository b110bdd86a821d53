"""Refuse a stage of DVC with other names than the schema allows, before a shell reads them.

DVC puts names of params.yaml into commands without quotes, and with `--single-item` or
`--ignore-errors` no stage before has validated them. It is the first command of stages with names:
DVC tells it the name of the stage, which holds all of them. Nothing is imported, to start fast.
"""

import os
import re
import sys

stage = os.environ.get("DVC_STAGE", "")
# from a folder below, DVC puts the path of dvc.yaml before the name
if not re.fullmatch(r"(?:[./]*dvc\.yaml:)?[a-z]+@[a-z0-9-]+", stage):
    print(
        f"names: error: {stage!r}: names are lower-case letters, digits and hyphens: change "
        "params.yaml",
        file=sys.stderr,
    )
    sys.exit(2)
