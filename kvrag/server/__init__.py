"""`kvrag serve`: OpenAI's HTTP API for an engine, and a corpus to retrieve from.

Import from the modules: the settings are checked before `app` and `corpus` import torch, which takes seconds.
"""
