"""Recompute control: cost model, controller, evidence."""
