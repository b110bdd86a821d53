"""The performance model: calibrated, fitted on a few timings, validated on others, extrapolated."""
