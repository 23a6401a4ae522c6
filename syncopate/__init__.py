"""Syncopate: example orders, data echoing and local steps for data-parallel training.

`from syncopate import ordering, local_opt` gives the same modules as `import ordering, local_opt`.
"""

import importlib
import types

PUBLIC = {"ordering": "Ordering", "local_opt": "local_steps"}  # with a name that each must have


def __getattr__(name: str) -> types.ModuleType:
    """The public packages, imported on first use because they import from this one."""
    if name not in PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(name)
    if not hasattr(module, PUBLIC[name]):
        raise ImportError(
            f"{name} is {getattr(module, '__file__', 'a folder')!r}, which hides Syncopate's "
            "package of that name: rename it."
        )
    return module


def __dir__() -> list[str]:
    return sorted([*globals(), *PUBLIC])
