"""Ingestion: texts to stored chunk KV."""
