"""The packages whose `__all__` is the public interface."""

import inspect
import types
from collections.abc import Callable

import local_opt
import models
import ordering


def packages(*tops):
    """These, and the modules that they name."""
    named = [getattr(top, name) for top in tops for name in top.__all__]
    return [*tops, *filter(inspect.ismodule, named)]


PACKAGES = packages(ordering, local_opt, models)


def returning(kind: type, *packages: types.ModuleType) -> dict[str, Callable]:
    """The public functions that return this kind, by the names of their `__all__`."""
    public = {n: getattr(package, n) for package in packages for n in package.__all__}
    return {
        name: function
        for name, function in public.items()
        if inspect.isfunction(function) and inspect.signature(function).return_annotation is kind
    }
