import threading
from kvrag.reuse.match import MatchIndex


class Catalog:
    def __init__(self, store):
        self.store = store
        self._index = MatchIndex()
        self._lock = threading.Lock()
        self._last = 0
        self._removals = store.removals()

    def match(self, ids, min_run, namespace=""):
        with self._lock:
            removals = self.store.removals()
            if removals != self._removals:
                self._index, self._last, self._removals = MatchIndex(), 0, removals
            entries = list(self.store.entries(self._last))
            if entries:
                self._index.add((e.key, e.ids, e.anchors) for e in entries)
                self._last = entries[-1].number
            self._last_ids = {r.key: self._index.ids(r.key) for r in self._index.match(ids, min_run)}
            return self._index.match(ids, min_run)

    def ids(self, text):
        return self._index.ids(text)

    def close(self):
        pass
