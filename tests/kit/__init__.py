"""Shared by the tests: cases, data, guarded buffers, the oracle, the comparison, the checks."""
