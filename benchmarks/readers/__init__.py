"""The readers' worlds, and how the readers are trained on them."""
