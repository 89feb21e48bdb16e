"""Turns plans into running kernels: source text, compilation, launches."""
