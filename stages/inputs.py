"""Say what each stage reads outside of the experiment, by content: data/inputs/STAGE.json."""

from pathlib import Path

from shardlab.config.parameters import Parameters
from shardlab.core.files import read_json, write_json
from stages import plans
from stages.common import require, run
from stages.outside import CONTENTS, contents_read

_FOLDER = Path("data/inputs")


def main(params: Parameters) -> None:
    """Write data/inputs/STAGE.json."""
    read = plans.inputs(params)["read"]
    contents = {}
    for name in {name for names in read.values() for name in names}:
        record = CONTENTS / f"{name}.json"
        require(record, f"content {name}")
        contents[name] = read_json(record)["sha256"]
    for stage, found in contents_read(read, contents).items():
        write_json(_FOLDER / f"{stage}.json", found)


if __name__ == "__main__":
    run(main)
