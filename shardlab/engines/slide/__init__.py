"""The slide engine: layers streamed from host memory through a window of device memory."""
