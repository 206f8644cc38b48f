"""Model backends: the protocol that blending needs, and its implementations."""
