"""Names that ray-kvrag imports for its command, `warm` and `serve` on a cluster, and for the server's front."""

# mypy: implicit-reexport
# ruff: noqa: F401

from __future__ import annotations

from kvrag.cli.common import add_number, at_least, open_engine, open_index, progress, say
from kvrag.cli.main import Parser, add_command, execute
from kvrag.cli.serve import add_arguments, build, read_config, read_settings
from kvrag.cli.warm import add_local_arguments, drop, find_gone, read_chunks, run_with
from kvrag.fingerprint import Fingerprint
from kvrag.retrieval.content import Problem
from kvrag.retrieval.index import ChunkIndex
from kvrag.server.api_errors import ApiError, describe, error_response
from kvrag.server.guard import Guard
from kvrag.server.run import bind
from kvrag.server.settings import ServerSettings
from kvrag.store import is_shared
from kvrag.store.values import share, text_key
from kvrag.words import counted, human_bytes
