"""The reader: a small bundled Llama that answers questions from context, in transformers' format.

`prompts` are the formats of RAG chains that it was trained on. Its training is in benchmarks/readers of the repository.
"""
