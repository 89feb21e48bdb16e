"""Runs the CUDA sources on the CPU: every thread a fiber, every PTX instruction a function."""
