"""Who waits for whom."""
