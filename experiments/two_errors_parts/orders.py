"""Orders of static vectors, epoch after epoch: fixed shards, and units dealt anew.

Shape letters as in `family`. Signs are PairBalance's; a dealt order goes over the units of all
workers and is handed out anew in every epoch.
"""

import itertools

import numpy as np


def shuffled(vectors, workers, rng):
    """D-RR: every worker shuffles its own units."""
    units = np.arange(len(vectors)).reshape(workers, -1)
    while True:
        yield rng.permuted(units, axis=1)


def dealt(vectors, workers, rng):
    """D-RR over all units, dealt."""
    while True:
        yield rng.permutation(len(vectors)).reshape(workers, -1)


def coordinated(vectors, workers, rng):
    """CD-GraB: one running sum of all workers' pairs, on fixed shards."""
    order = next(shuffled(vectors, workers, rng))
    while True:
        yield order
        pairs = order.reshape(workers, -1, 2)
        first = signed(vectors, pairs.swapaxes(0, 1).reshape(-1, 2))
        first = first.reshape(-1, workers, 2).swapaxes(0, 1)
        order = np.stack([placed(own) for own in first])


def independent(vectors, workers, rng):
    """Independent pair balance: a running sum per worker, on fixed shards."""
    order = next(shuffled(vectors, workers, rng))
    while True:
        yield order
        order = np.stack([placed(signed(vectors, own.reshape(-1, 2))) for own in order])


def round_robin(vectors, workers, rng):
    """CD-GraB dealt: the balanced order of all units, its n-th unit to worker n mod W."""
    return _all(vectors, workers, rng, lambda order: order.reshape(-1, workers).T)


def chunks(vectors, workers, rng):
    """CD-GraB dealt in chunks: the first M of the balanced order to the first worker, and so on."""
    return _all(vectors, workers, rng, lambda order: order.reshape(workers, -1))


def _all(vectors, workers, rng, deal):
    order = rng.permutation(len(vectors)).reshape(workers, -1)
    while True:
        yield order
        pairs = order.reshape(workers, -1, 2).swapaxes(0, 1).reshape(-1, 2)
        order = deal(placed(signed(vectors, pairs)))


def signed(vectors, pairs) -> np.ndarray:
    """The pairs, each with the unit first that goes to the front; signs one after the other."""
    differences = vectors[pairs[:, 0]] - vectors[pairs[:, 1]]
    total, minus = np.zeros(vectors.shape[1]), np.zeros(len(pairs), bool)
    for p, difference in enumerate(differences):
        minus[p] = total @ difference > 0
        total += -difference if minus[p] else difference
    return np.where(minus[:, None], pairs[:, ::-1], pairs)


def placed(pairs) -> np.ndarray:
    """Firsts from the front, seconds from the back."""
    return np.concatenate([pairs[:, 0], pairs[::-1, 1]])


# name -> (label, generator of int[W, M] of every epoch)
ORDERS = {
    "rr": ("D-RR", shuffled),
    "cd_grab": ("CD-GraB", coordinated),
    "id_pair": ("independent pair", independent),
    "dealt": ("D-RR, dealt", dealt),
    "round_robin": ("CD-GraB, dealt round robin", round_robin),
    "chunks": ("CD-GraB, dealt in chunks", chunks),
}


def epochs_of(name: str, vectors: np.ndarray, workers: int, epochs: int, seed: int) -> np.ndarray:
    """int[K, W, M], after eight epochs in which the order has found itself."""
    made = ORDERS[name][1](vectors, workers, np.random.default_rng([seed, 2]))
    return np.stack([*itertools.islice(made, 8, 8 + epochs)])
