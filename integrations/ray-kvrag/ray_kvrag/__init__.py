"""kvrag on a Ray cluster: `kvrag warm --ray` encodes with many workers, `kvrag serve --ray` serves with replicas."""
