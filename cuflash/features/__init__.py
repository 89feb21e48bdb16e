"""What a call may have besides q, k, v and a causal mask: a file and a row for each feature."""
