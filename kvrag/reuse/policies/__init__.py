"""The policies, one module each. The name of the module is the name of the policy.

A module defines a `Policy` with the module's name in capitals, `FirstK` in `first_k`. Its fields are its settings.
"""
