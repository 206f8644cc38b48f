"""kvrag on a Ray cluster: `kvrag warm --ray` encodes on many workers, `kvrag serve --ray` runs several replicas."""
