"""Answer quality on the readers' worlds."""
