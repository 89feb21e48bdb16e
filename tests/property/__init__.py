"""Properties that must hold for every problem, backend and algorithm."""
