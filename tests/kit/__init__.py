"""What the tests share: cases, data, guarded buffers, the oracle, the comparison, the checks."""
