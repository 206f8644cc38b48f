"""Which chunks there are, and where a prompt contains them."""
