"""The training run: ranks, loop, checkpoints, timings, evaluation, chat."""
