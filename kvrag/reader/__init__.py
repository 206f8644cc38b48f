"""The reader: a small Llama of our own that really reads, its weights, and how it was trained.

`world` draws articles and questions, `prompts` pastes them as RAG chains do, `net` is the model in the form in which
`train` trains it. What is in this folder besides is a trained model as transformers loads it; its weights are still
those of an earlier training on an earlier world.
"""
