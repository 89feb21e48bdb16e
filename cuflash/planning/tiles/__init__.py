"""Candidate tiles of every kernel family, and what each of them needs."""
