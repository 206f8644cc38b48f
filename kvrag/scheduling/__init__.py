"""Who waits for whom. There are two kinds of waiting.

Threads wait for the model (`waiting`): an answer begins when its KV fits into the byte budget, prefills and decode
steps take turns, and answers share their steps. Requests of a server wait on its event loop for a place, in
`kvrag.server.queue`; their work then runs in threads that the event loop reads, as that of the engine's async methods
does (`bridge`).
"""
