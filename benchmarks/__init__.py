"""Benchmarks, the cluster simulation and the training of the readers: in the repository, not in the package."""
