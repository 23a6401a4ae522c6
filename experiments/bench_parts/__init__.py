"""The parts of `experiments.bench`, a table each."""
