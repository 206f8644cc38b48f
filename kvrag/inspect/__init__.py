"""Reports on a prompt and checks of a model: explain, verify."""
