"""Everything used of JAX that it may remove, each with what replaces it in JAX 0.12."""

from typing import Any

from jax.experimental import multihost_utils as multihost_utils  # nothing yet
from jax.experimental import pallas as pallas  # nothing yet
from jax.experimental import topologies as topologies  # nothing yet
from jax.experimental.compilation_cache import compilation_cache as compilation_cache  # nothing yet
from jax.experimental.layout import Format as Format  # nothing yet; what jax.Array.format returns
from jax.extend import core

__all__ = [
    "Format",
    "axis_names",
    "compilation_cache",
    "coordination_client",
    "multihost_utils",
    "pallas",
    "topologies",
    "triton",
]


def axis_names() -> list[str]:
    """All named axes in scope. `get_abstract_mesh().manual_axes` lacks those of vmap and pmap."""
    return core.unsafe_get_axis_names_DO_NOT_USE()  # pyright: ignore[reportPrivateImportUsage]


def coordination_client() -> Any:
    """The coordinator's store, with timeouts; None in one process. Nothing replaces it yet."""
    from jax._src.distributed import global_state

    return global_state.client


def triton() -> Any:
    """What Pallas passes to Triton. Imported on use: it takes a fifth of a second."""
    from jax.experimental.pallas import triton

    return triton
