"""Imported once by the process from which those of the campaign `kill` are forked."""

from torture import kill, tiny

tiny.model()
__all__ = ["kill"]
