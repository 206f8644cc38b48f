"""A second reader and its world, trained without guidance of its attention.

`world` generates registers cut into chunks, and questions about them; `train` trains a reader on them. Architecture and
prompt formats are those of the first.
"""
