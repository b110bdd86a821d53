"""Stages of the pipeline, and the other commands: one thin command each."""

import gc
import os
import signal
import sys

from shardlab.core.process import die_with_parent

# Stages fork their ranks, and a process that has asked the CUDA driver cannot fork one that uses
# CUDA. With this torch.cuda.is_available, which libraries call freely, asks NVML instead.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


# "-m" stands there while `python -m stages.NAME` looks for its module
if sys.argv[0] == "-m":
    # All that is imported stays, and to search it for garbage again and again takes a quarter of
    # the time of the imports: `stages.common` turns the collector on when they are done, and
    # handles signals.
    gc.disable()
    # Ctrl-C amid imports needs no traceback
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # A job ends with its tool, a stage that was typed may outlive its shell (nohup). Before the
    # imports, which take seconds: after them a killed tool is no longer the parent.
    if {"SHARDLAB_LOCK", "DVC_STAGE"} & os.environ.keys():
        die_with_parent(os.getppid(), signal.SIGTERM)
