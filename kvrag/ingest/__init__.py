"""Ingestion: from texts to stored chunk KV."""
