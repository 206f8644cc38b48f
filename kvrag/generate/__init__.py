"""Generation from a complete cache: decoding, grammars, tool calls."""
