"""The performance model: learnt from a few timings, checked on others, carried to more ranks."""
