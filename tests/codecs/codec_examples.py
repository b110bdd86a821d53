"""Examples of every built-in codec, from the table of codecs."""

from shardlab.strategy.codec_table import BUILT_IN

SPECS = [e for spec in BUILT_IN.values() if not spec.multi_phase for e in spec.examples]
"""Codecs with one payload per message."""
METHODS = [e for spec in BUILT_IN.values() if spec.multi_phase for e in spec.examples]
"""Multi-phase methods."""
