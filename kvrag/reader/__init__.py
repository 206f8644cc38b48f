"""The reader: a small bundled Llama that answers questions from context, in transformers' format."""
