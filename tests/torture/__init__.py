"""Torture campaigns: kills, damaged files, failing disks, hostile texts and requests, long mixed loads.

`make torture` runs them; docs/operations.md says what they show. They are not part of the ordinary test suite.
"""
