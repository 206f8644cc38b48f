"""How much to recompute: cost model, controller, calibration."""
