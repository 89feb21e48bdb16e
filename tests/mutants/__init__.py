"""Planted bugs, each of which a named test must kill."""
