"""`kvrag serve`: OpenAI's HTTP API for an engine, and a corpus to retrieve from."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvrag.server.app import create_app
    from kvrag.server.corpus import Corpus, CorpusInUseError
    from kvrag.server.run import bind, make_server, serve, url
    from kvrag.server.settings import ApiKey, ServerSettings

# imported on first use: the settings are checked before torch is imported, which takes seconds
_MODULES = {
    "ApiKey": "settings",
    "Corpus": "corpus",
    "CorpusInUseError": "corpus",
    "ServerSettings": "settings",
    "bind": "run",
    "create_app": "app",
    "make_server": "run",
    "serve": "run",
    "url": "run",
}

__all__ = [
    "ApiKey",
    "Corpus",
    "CorpusInUseError",
    "ServerSettings",
    "bind",
    "create_app",
    "make_server",
    "serve",
    "url",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
