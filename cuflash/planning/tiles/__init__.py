"""Candidate tiles of every kernel family, and the resources they need."""
