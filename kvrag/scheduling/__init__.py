"""Who waits for whom. There are two kinds of waiting.

Threads wait for the model: an answer begins when its KV fits into the byte budget (`admission`), prefills and decode
steps take turns (`lock`), and the answers that are decoded at the same time share every step (`batch`).

Requests of a server wait on its event loop for a place (`queue`). Their work then runs in threads that the event loop
reads (`bridge`), as that of the engine's asynchronous methods does, and waits for the model there.
"""
