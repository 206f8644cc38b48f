"""From a complete cache to text: decoding, grammars, tool calls."""
