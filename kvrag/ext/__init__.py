"""Names that kvrag's own integrations import from inside kvrag, besides the public ones; the rest is private.

They can change in any release: the packages of one release belong together.
"""
