"""What the coordination of an order sends, in all-reduces of the parameters."""

from collections.abc import Callable

from experiments.loads import Sizes
from experiments.methods import Method
from ordering.pair_balance import SHARED_BLOCK


def order_sent(method: Method, sizes: Sizes, num_params: int) -> Callable[[int], float]:
    """`loads -> what a worker has sent for its order after so many`, in all-reduces.

    Independent orders send nothing. Of a coordinated one every fresh step exchanges its rows, n / 2
    all-reduces for n of them, and adds up the inner products of its pairs over the workers.

    Args:
      method: the order; sizes: of the run; num_params: D, of the model.

    Example:
      >>> from experiments import loads, methods, volume
      >>> sizes = loads.Sizes(workers=8, num_units=10, units_per_step=1, unit_size=16)
      >>> sent = volume.order_sent(methods.METHODS["cd_grab"], sizes, num_params=10**6)
      >>> sent(10), volume.order_sent(methods.METHODS["rr"], sizes, 10**6)(10)
      (5.00072, 0.0)
    """
    if not method.coordinated or sizes.workers == 1:
        return lambda loads: 0.0
    whole = step_sent(sizes.units_per_step, sizes, num_params)
    tail = sizes.num_units % sizes.units_per_step
    last = step_sent(tail, sizes, num_params) if tail else whole

    def sent(loads: int) -> float:
        epochs, rest = divmod(loads, sizes.loads_per_epoch)
        return epochs * ((sizes.loads_per_epoch - 1) * whole + last) + rest * whole

    return sent


def step_sent(size: int, sizes: Sizes, num_params: int) -> float:
    """The same of one fresh step with `size` units per worker.

    An even number of units per step sends the differences of its pairs, an odd one all gradients.
    Pairs are signed in blocks of b, whose b (b + 1) products take one reduction.
    """
    splits = sizes.units_per_step % 2
    pairs = (size + splits) // 2
    if not pairs:
        return 0.0
    rows = size if splits else pairs
    padded = -(-num_params // sizes.workers) * sizes.workers
    blocks, rest = divmod(pairs * sizes.workers, SHARED_BLOCK)
    products = blocks * SHARED_BLOCK * (SHARED_BLOCK + 1) + rest * (rest + 1)
    return rows / 2 * padded / num_params + products / num_params
