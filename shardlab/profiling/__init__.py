"""Where the time of a step goes: capturing traces, joining those of all ranks, measuring them."""
