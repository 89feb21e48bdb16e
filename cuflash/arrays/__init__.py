"""Adopts any array as a 4-axis view, and returns results in the caller's kind of array."""
