"""Blocks of files and their windows in plain loops. The fast paths must equal these."""

import numpy as np


def blocks_of(file_sizes, unit_size, multiple_of=1, kept=None):
    """The records of every unit, numbered over all files; a block ends where its file ends.

    Neighbours that together have few records are one.
    """
    units, first = [], 0
    for size in file_sizes:
        for start in range(0, size, unit_size):
            unit = range(first + start, first + min(start + unit_size, size))
            unit = [i for i in unit if kept is None or kept[i]]
            if units and len(units[-1] + unit) <= unit_size:
                units[-1] += unit
            else:
                units.append(unit)
        first += size
    while len(units) % multiple_of:
        units.append([])
    return units


def shuffled(records, seeds):
    """The permutation of a window: its records by raw random numbers of 64 bits."""
    numbers = np.random.Philox(np.random.SeedSequence(seeds)).random_raw(len(records)).tolist()
    return [records[i] for i in sorted(range(len(records)), key=lambda i: (numbers[i], i))]


def window_of(units, window, *, batch_size, seed, epoch):
    """The batches [T][b] of a worker's window: a record and the place of its unit, or (None, -1).

    The largest unit of all decides how many batches there are.
    """
    results = [(record, place) for place, unit in enumerate(window) for record in units[unit]]
    results = shuffled(results, (seed, epoch, window[0]))
    count = -(-len(window) * max(map(len, units)) // batch_size)
    results += [(None, -1)] * (count * batch_size - len(results))
    return [results[t * batch_size : (t + 1) * batch_size] for t in range(count)]


def epoch_of(units, orders, *, window, **options):
    """The batches [T][W][b] of an epoch; orders [W][M] name units of all workers."""
    batches = []
    for start in range(0, len(orders[0]), window):
        lanes = [window_of(units, order[start : start + window], **options) for order in orders]
        batches += [[lane[t] for lane in lanes] for t in range(len(lanes[0]))]
    return batches


def packed(tokens, length, separator=None, side="end"):
    """The windows of a file of tokens, and the document of each of their tokens."""
    windows = []
    for i in range((len(tokens) - 1) // length):
        window, documents, document = list(tokens[i * length : i * length + length + 1]), [], 0
        for place, token in enumerate(window):
            document += side == "start" and token == separator and place > 0
            documents.append(document)
            document += side == "end" and token == separator
        windows.append((window, documents))
    return windows
