"""Decides what runs, from descriptions alone: no arrays, no device code."""
