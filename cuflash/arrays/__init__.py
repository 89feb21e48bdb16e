"""Adopts any array as a 4-axis view and gives answers back in kind."""
