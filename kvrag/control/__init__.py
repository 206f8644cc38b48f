"""Recompute control: cost model, controller, calibration."""
