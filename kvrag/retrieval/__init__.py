"""Reading files, and embedding search over chunks, for the command line, the server and the examples."""
