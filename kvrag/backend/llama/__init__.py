"""The llama.cpp backend: GGUF files in their own bits, through the public functions of llama.h."""
