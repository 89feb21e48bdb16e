"""The features of a call besides q, k, v and a causal mask: one file and one table row each."""
