"""Capture of traces with torch.profiler, and the merge of all ranks' traces."""
