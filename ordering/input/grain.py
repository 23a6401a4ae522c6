"""An order as a Grain dataset. Grain is imported only when it is used."""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Int, PyTree

from ordering.input.sources import ARRAYS, check_indices, never_ends, reader

if TYPE_CHECKING:
    import grain


def grain_dataset(
    source: PyTree[ArrayLike] | Sequence, indices: Int[ArrayLike, "n"] | Sequence[int]
) -> "grain.MapDataset":
    """The examples that an order names, one by one, as a Grain `MapDataset`.

    Element i is `source[indices[i]]`, as it is. It takes the place of a shuffled dataset, whose
    `map`, `batch`, `to_iter_dataset` and `mp_prefetch` stay. Batch before `to_iter_dataset`: then
    the batches do not depend on the number of processes.

    Args:
      source: as in `reader`, such as a `MapDataset` or `tfds.data_source`.
      indices: as in `tf_dataset`.

    Returns:
      A `grain.MapDataset` of one epoch. Leave `shuffle` and `repeat` out.

    Raises:
      ValueError: for a source or indices that do not fit.
      ImportError: if Grain is not installed.

    Examples:
      >>> import numpy as np
      >>> from syncopate import ordering
      >>> dataset = ordering.input.grain_dataset(np.arange(4) * 10, [2, 0, 3, 1])
      >>> [batch.tolist() for batch in dataset.batch(2)]
      [[20, 0], [30, 10]]

    References:
      Grain's datasets, https://google-grain.readthedocs.io/en/latest/
    """
    indices = check_indices(indices, reader(source)[0])
    try:
        import grain
    except ImportError as error:
        raise ImportError("Grain cannot be imported: pip install grain.") from error
    if isinstance(source, ARRAYS):
        source = jax.tree.map(np.asarray, source)
    places: Any = indices  # an array is a source, too
    return grain.MapDataset.source(places).map(functools.partial(_example, source))


def _example(source, i):
    if isinstance(source, ARRAYS):
        return jax.tree.map(lambda x: x[i], source)
    return never_ends(lambda: source[int(i)])
