"""The performance model: fitted on a few timings, validated on others, extrapolated."""
