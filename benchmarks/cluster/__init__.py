"""A cost model of single machines, and the simulation of a cluster."""
