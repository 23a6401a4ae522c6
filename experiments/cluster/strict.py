"""Strict JSON: everything that is written as JSON, or read from it, goes through this module."""

import json
import math
from collections.abc import Mapping

from syncopate.refusals import UserError

WHAT_TO_DO = (
    "restore it from a copy, choose another --output_dir, or pass --overwrite to begin again."
)


def dumps(value, **options) -> str:
    """The text of a value. Numbers that are not finite are null, since JSON has none."""
    try:
        return json.dumps(value, allow_nan=False, default=plain, **options)
    except (TypeError, ValueError):  # numbers that are not finite, or names that are not text
        return json.dumps(plain(value), allow_nan=False, **options)


def loads(text: str | bytes, what: str, kind: type = dict):
    """The value of a text; ValueError, which names `what`, unless it is JSON of this kind."""
    try:
        if isinstance(value := json.loads(text), kind):
            return value
        wrong = f"it holds {type(value).__name__}, not {kind.__name__}"
    except (ValueError, RecursionError) as error:
        wrong = error
    raise UserError(f"{what} is broken ({wrong}): {WHAT_TO_DO}")


def plain(value):
    """The value as JSON gives it back: arrays and tuples are lists, not finite numbers None."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (list, tuple)):
        return [*map(plain, value)]
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    return value
