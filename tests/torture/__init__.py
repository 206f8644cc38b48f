"""Torture campaigns: kills, damaged files, failing disks, hostile texts and requests, long mixed loads.

`make torture` runs them; README.md has the results. They are not part of the ordinary test suite.
"""
