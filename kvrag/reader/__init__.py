"""The reader: a small bundled Llama that answers questions from context, with the code that trained it.

`world` generates articles and questions, `prompts` formats them like RAG chains, `net` is the architecture for
training, `train` trains it. The folder also contains a trained model in transformers' format. Its weights are from an
earlier training on an earlier version of the world.
"""
