"""What everything else rests on: parameters, strategies, records, files, processes, errors."""
