"""Measurements that anyone can repeat: each prints its command, shapes, dtype, threads and versions."""
