"""What must hold for every problem, on every backend and algorithm."""
