"""The policies, one module each. The name of the module is the name of the policy.

A module defines `score(context: Context) -> Tensor`, the (T,) scores of all positions: those with higher ones are
recomputed first, those with -inf never. If that runs layers of the model, it also defines
`passes(config: BlendConfig, num_layers: int) -> Passes`, from which the controller predicts the time.
"""
