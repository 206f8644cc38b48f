"""Client of `kvrag serve`, and of vLLM with kvrag's KV connector."""

from kvrag.client.remote_engine import RemoteEngine

__all__ = ["RemoteEngine"]
