"""Layer sliding: host memory owns parameters and optimizer states, the device sees a window."""
