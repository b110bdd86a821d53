"""An emulated link inside of one rank: its operations end as late as the link would end them."""

import time
from threading import Lock

from torch.profiler import record_function

from shardlab.profiling.traces.labels import LINK


class LinkThrottle:
    """The end of one rank's link: a clock that all operations of the rank share.

    An operation that is issued at t and moves b bytes ends no earlier than
    max(t, when the link is free) + 8 b / rate + delay; the link is free again `delay` before that.
    Both directions of the link are alike, so b is the larger one of what is sent and what is taken.

    Args:
        bits_per_second: None where something else holds the bytes back.
    """

    def __init__(self, delay_ms: float, bits_per_second: int | None = None) -> None:
        self._delay_s = delay_ms / 1e3
        self._bits_per_second = bits_per_second
        self._free = 0.0
        self._lock = Lock()

    def carry(self, nbytes: float) -> float:
        """When the link has carried an operation that is issued now, by `time.perf_counter`."""
        seconds = 8 * nbytes / self._bits_per_second if self._bits_per_second else 0.0
        with self._lock:
            self._free = max(time.perf_counter(), self._free) + seconds
            return self._free

    def end(self, carried: float) -> None:
        """Sleeps until an operation ends that was carried by then."""
        left = carried + self._delay_s - time.perf_counter()
        if left > 0:
            with record_function(LINK):
                time.sleep(left)
