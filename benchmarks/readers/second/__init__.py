"""The world of a second reader, which was trained without guidance of its attention.

`world` generates registers cut into chunks, and questions about them.
"""
