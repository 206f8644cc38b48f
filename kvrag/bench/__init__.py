"""Reproducible benchmarks. Each prints its command, shapes, dtype, threads and versions."""
