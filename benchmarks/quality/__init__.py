"""Answer quality on the readers' worlds, and plots."""
