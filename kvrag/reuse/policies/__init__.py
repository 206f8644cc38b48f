"""The policies, one module each. The name of the module is the name of the policy.

A module defines `score(context: Context) -> Scores`, which scores every position, and, if that runs layers of the
model, `passes(config: BlendConfig, num_layers: int) -> Passes`, from which the controller predicts the time.
"""
