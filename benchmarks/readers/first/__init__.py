"""The bundled reader's world: articles and questions.

The bundled weights (`kvrag/reader`) are from a training on an earlier version of the world.
"""
