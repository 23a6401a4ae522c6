"""One absl entrypoint per experiment; the pieces are importable from a notebook."""
