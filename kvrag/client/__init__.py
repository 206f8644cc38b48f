"""Client of `kvrag serve`, and of vLLM with kvrag's KV connector."""

from kvrag.client.remote import RemoteEngine

__all__ = ["RemoteEngine"]
