"""`kvrag serve`: OpenAI's HTTP interface in front of an engine, and a corpus that it answers from."""

from kvrag.server.app import create_app
from kvrag.server.corpus import Corpus
from kvrag.server.run import bind, make_server, serve, url
from kvrag.server.settings import ServerSettings

__all__ = ["Corpus", "ServerSettings", "bind", "create_app", "make_server", "serve", "url"]
