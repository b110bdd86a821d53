"""Checkpoints: the state of a run, complete on disk or absent, and without pickles.

step-00000040/
  checkpoint.json              origin, and the checksum of every other file
  model.safetensors            format full: parameters by the names of the unwrapped model
  optimizer.safetensors        and `exp_avg`, `exp_avg_sq` and `step` of each of them
  sharded/*.safetensors        format sharded: torch.distributed.checkpoint, one file per rank
  rank-00000.safetensors       of each rank: residuals, counters, random states, events, ledger
"""
