"""The bundled reader's world and training.

`world` generates articles and questions, `net` is the architecture for training, `train` trains it. The bundled weights
(`kvrag/reader`) are from an earlier training on an earlier version of the world.
"""
