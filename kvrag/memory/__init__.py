"""Every KV that is in memory."""
