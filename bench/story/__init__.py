"""Measures the papers' claims: speed, extra memory, bytes of device memory, share of the peak."""
