"""Listeners watch answers and change none of them: a file each. Their list is in `kvrag.answer`."""
