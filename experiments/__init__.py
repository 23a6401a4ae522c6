"""One absl entrypoint per experiment; the pieces are importable from a notebook."""

import sys

# While Python looks for `-m experiments.NAME`, "-m" stands where its path will. JAX takes seconds.
if sys.argv[:1] == ["-m"] and not any(text.startswith("--process_id=") for text in sys.argv):
    print("Loading JAX and the experiment", file=sys.stderr, flush=True)
