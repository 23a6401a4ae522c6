"""The packages whose `__all__` is the public interface."""

import inspect

import local_opt
import models
import ordering


def packages(*tops):
    """These, and the modules that they name."""
    named = [getattr(top, name) for top in tops for name in top.__all__]
    return [*tops, *filter(inspect.ismodule, named)]


PACKAGES = packages(ordering, local_opt, models)
