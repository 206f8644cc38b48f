"""Benchmarks of speed and size, on random weights of real shapes."""
