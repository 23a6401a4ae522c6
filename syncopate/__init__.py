"""Syncopate: which example comes next, when a batch is used again, and when workers talk.

`from syncopate import ordering, local_opt` and `import ordering, local_opt` are the same modules.
`plans` is what these two share, `models` what the experiments train.
"""

import importlib

PUBLIC = {"ordering": "Ordering", "local_opt": "local_steps"}  # and what tells them from others


def __getattr__(name: str):
    """The public packages; they import from here themselves, so only when they are asked for."""
    if name not in PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(name)
    if not hasattr(module, PUBLIC[name]):
        raise ImportError(
            f"{name} is {getattr(module, '__file__', 'a folder')!r}, which hides the package of "
            "that name: rename it."
        )
    return module


def __dir__() -> list[str]:
    return sorted([*globals(), *PUBLIC])
