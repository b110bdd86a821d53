"""Layer sliding: main memory owns parameters and optimizer states, the device sees a window."""
