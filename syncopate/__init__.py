"""Syncopate: example orders, data echoing and local steps for data-parallel training.

`from syncopate import ordering, local_opt` gives the same modules as `import ordering, local_opt`.
"""

import importlib
import importlib.util
from typing import Any

__version__ = "0.1.0"
DISTRIBUTION = "syncopate-jax"  # its name for pip, since "syncopate" is another project on PyPI
PUBLIC = {"ordering": "Ordering", "local_opt": "local_steps"}  # with a name that each must have


def __getattr__(name: str) -> Any:
    """A public package, imported on first use because it imports from this one."""
    if name not in PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{_home(name)}")
    module = importlib.import_module(name)
    if not hasattr(module, PUBLIC[name]):
        raise ImportError(
            f"{name} is {getattr(module, '__file__', 'a folder')!r}, which hides Syncopate's "
            "package of that name: rename it."
        )
    return module


def install(*extras: str) -> str:
    """The command that installs the package with these extras, for messages."""
    return f"pip install '{DISTRIBUTION}[{','.join(extras)}]'"


def _home(name: str) -> str:
    """The end of a message: which public module has a name that is not here; "" if none has."""
    # Python asks for modules of this package, too, perhaps while it imports the public packages.
    if name.startswith("_") or importlib.util.find_spec(f"{__name__}.{name}"):
        return ""
    for package in PUBLIC:
        try:
            module = __getattr__(package)
        except ImportError:  # a user's own module of that name, which its import reports
            continue
        for inner in [module, *(getattr(module, n) for n in module.__all__)]:
            if name in getattr(inner, "__all__", ()):
                return f": it is {inner.__name__}.{name}, after `from syncopate import {package}`."
    return ""


def __dir__() -> list[str]:
    return sorted([*globals(), *PUBLIC])
