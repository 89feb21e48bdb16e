"""The papers' claims measured: speed, extra memory, bytes of device memory, share of the peak."""
