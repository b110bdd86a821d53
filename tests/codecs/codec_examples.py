"""The examples that the table gives for every built-in codec."""

from shardlab.strategy.codec_table import BUILT_IN

SPECS = [e for spec in BUILT_IN.values() if not spec.multi_phase for e in spec.examples]
"""of codecs with one payload per message"""
METHODS = [e for spec in BUILT_IN.values() if spec.multi_phase for e in spec.examples]
"""of methods of several phases"""
