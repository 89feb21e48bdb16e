"""What needs a CUDA device and is not a property of attention itself."""
