"""The policies, one module each. The name of the module is the name of the policy.

A module defines a `Policy` with the module's name in capitals, `FirstK` in `first_k`; its fields are its settings.
"""

from kvrag.reuse.select import policy_of

__all__ = ["policy_of"]
