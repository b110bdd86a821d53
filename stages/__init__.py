"""Stages of the pipeline: one thin command each."""

import gc
import sys

# "-m" stands there while `python -m stages.NAME` looks for its module. All that it imports stays,
# and to search it for garbage again and again takes a quarter of the time of the imports:
# `stages.common.run` turns the collector on when they are done.
if sys.argv[0] == "-m":
    gc.disable()
