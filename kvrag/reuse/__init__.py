"""Reuse of chunk KV in a prompt: match, stitch, select, blend, and conversations."""
