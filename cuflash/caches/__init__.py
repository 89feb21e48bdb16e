"""Caches of keys and values: appending to them, and attention over what they hold."""
