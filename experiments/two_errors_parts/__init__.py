"""The modules of `experiments.two_errors`."""
