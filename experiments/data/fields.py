"""A row of a table says by its keywords without a default which hyper-parameters it follows."""

import functools
import inspect
from collections.abc import Callable
from typing import Any


@functools.cache
def fields_of(function: Callable) -> tuple[str, ...]:
    """The fields of a recipe that a function takes by keyword."""
    parameters = inspect.signature(function).parameters.values()
    return tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty)


def called(function: Callable, fields: Any, *args):
    """What a function returns for arguments, and for the fields that it takes of a recipe."""
    return function(*args, **{name: getattr(fields, name) for name in fields_of(function)})
