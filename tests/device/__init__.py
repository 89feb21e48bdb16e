"""Tests that need a CUDA device and are not properties of attention itself."""
