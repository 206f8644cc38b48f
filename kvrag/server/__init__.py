"""`kvrag serve`: OpenAI's HTTP API for an engine, and a corpus to retrieve from."""

from kvrag.server.app import create_app
from kvrag.server.corpus import Corpus
from kvrag.server.run import bind, make_server, serve, url
from kvrag.server.settings import ApiKey, ServerSettings

__all__ = ["ApiKey", "Corpus", "ServerSettings", "bind", "create_app", "make_server", "serve", "url"]
