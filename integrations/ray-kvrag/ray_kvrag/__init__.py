"""kvrag on a Ray cluster: `ray-kvrag warm` encodes on many workers, `ray-kvrag serve` runs several replicas."""
