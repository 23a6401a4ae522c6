"""The parts of `experiments.slow_sde`: its problems, their theory, and the runs."""
