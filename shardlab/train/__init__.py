"""The training run: ranks, loop, telemetry, saved model, evaluation."""
