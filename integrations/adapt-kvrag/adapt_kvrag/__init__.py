"""Training of an adapter for encoding, so that stored KV is nearer to what a prompt would compute: `kvrag adapt`."""
