"""What a call may have besides q, k, v and a causal mask: one file and one row per feature."""
