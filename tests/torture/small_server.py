"""`python -m torture.small_server FOLDER MAX_BYTES`: a server whose caches fill up within seconds.

With the default sizes, memory would grow for an hour while the caches fill.
"""

import json
import sys

from kvrag import BlendEngine, FileStore
from kvrag.server.app import create_app
from kvrag.server.run import bind, make_server, share_arenas, url
from kvrag.server.settings import ServerSettings

_CACHE = 48 << 20

if __name__ == "__main__":
    share_arenas()
    store = FileStore(sys.argv[1], max_bytes=int(sys.argv[2]), min_free_bytes=0)
    sizes = {"ram_bytes": _CACHE, "conversation_bytes": _CACHE, "batch_bytes": 4 * _CACHE}
    with bind("127.0.0.1", 0) as taken, BlendEngine.from_pretrained("reader", store=store, **sizes) as engine:
        app = create_app(engine, ServerSettings(name="reader", max_tokens=8, queue=64))
        taken.listen()
        print(json.dumps({"url": url(taken)}), flush=True)
        make_server(app, 5).run([taken])
