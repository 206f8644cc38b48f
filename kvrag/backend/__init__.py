"""What blending needs of a model, and its implementations."""
