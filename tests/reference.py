"""The papers' algorithms in float64 NumPy, line by line and slow. Fast paths must equal these."""

import math
from fractions import Fraction

import numpy as np
from scipy.linalg import hadamard


def greedy_sign(dot, norm2):
    return 1.0 if dot <= 0 else -1.0


def walk_sign(bound, coins):
    """Self-balancing walk (Alweiss, Liu, Sawhney 2021); coins are uniform in [0, 1)."""
    coins = iter(coins)

    def sign(dot, norm2):
        plus = min(max(0.5 - dot / (2 * bound), 0.0), 1.0)
        return 1.0 if next(coins) < plus else -1.0

    return sign


def halving_sign(num_epochs, num_pairs, delta, epoch, coins):
    """Kernel halving (Carrell et al. 2025), one epoch (from 0); coins are uniform in [-1, 1)."""
    state = {"scale": 0.0, "pair": 0}
    penalty = 4 / delta * (np.log(num_epochs) + 1) * (np.log(num_pairs) + 1)

    def sign(dot, norm2):
        state["pair"] += 1
        log_penalty = np.log(penalty * state["pair"])
        for k in range(1, epoch + 1):  # at the start of epoch k + 1
            log_penalty += np.log(1 + 1 / k)
        coin = coins[state["pair"] - 1]
        if norm2 == 0:
            return 1.0
        ratio = state["scale"] * log_penalty / norm2
        if ratio <= 1:
            threshold = norm2
            state["scale"] = 2 * norm2
        else:
            threshold = norm2 * np.sqrt(ratio)
            state["scale"] += 2 * norm2 * max(0.0, log_penalty + 0.5 - np.sqrt(ratio)) / log_penalty
        return 1.0 if dot <= coin * threshold else -1.0

    return sign


def balance(vectors, total, sign=greedy_sign):
    """Signs of vectors [n, D] one after the other, and the running sum after them."""
    total, signs = np.array(total, np.float64), []
    for c in np.asarray(vectors, np.float64):
        if not np.isfinite(c @ c):
            signs.append(1.0)
            continue
        s = sign(total @ c, c @ c)
        total = total + s * c
        signs.append(s)
    return np.array(signs), total


def pair_balance_epoch(order, gradients, sign=greedy_sign):
    """PairBalance: the next order of one worker; gradients [M, D] belong to the units."""
    return cd_grab_epoch([order], [gradients], sign)[0]


def cd_grab_epoch(orders, gradients, sign=greedy_sign, *, team_size=None, gathers=()):
    """CD-GraB (Cooper et al. 2023): pairs in the outer loop, workers in the inner one.

    In teams each has its own running sum; after so many pairs as `gathers` names they all get the
    mean.
    """
    workers, units = len(orders), len(orders[0])
    following = [[None] * units for _ in range(workers)]
    left, right, team_size = 0, units - 1, team_size or workers
    totals = np.zeros((workers // team_size, np.asarray(gradients[0]).shape[1]))
    for k in range(units // 2):
        for w in range(workers):
            a, b = orders[w][2 * k], orders[w][2 * k + 1]
            g, team = np.asarray(gradients[w], np.float64), w // team_size
            (s,), totals[team] = balance([g[a] - g[b]], totals[team], sign)
            following[w][left], following[w][right] = (a, b) if s > 0 else (b, a)
        if k + 1 in gathers:
            totals[:] = totals.mean(axis=0)
        left, right = left + 1, right - 1
    if units % 2:  # the unit without a partner: the one slot that is free
        for w in range(workers):
            following[w][left] = orders[w][-1]
    return following


def global_epoch(orders, gradients, sign=greedy_sign, *, alone=False):
    """Pairs of all workers in one order of all units, from both ends, and dealt anew.

    gradients [W M, D] belong to all units; `alone`: every worker balances its own pairs.
    """
    workers, units = len(orders), len(orders[0])
    if alone:
        placed = [pair_balance_epoch(order, gradients, sign) for order in orders]
    else:
        placed = cd_grab_epoch(orders, [gradients] * workers, sign)
    everyone = [None] * (workers * units)
    left, right = 0, workers * units - 1
    for k in range(units // 2):
        for w in range(workers):
            everyone[left], everyone[right] = placed[w][k], placed[w][units - 1 - k]
            left, right = left + 1, right - 1
    if units % 2:  # units without a partner, in the middle
        everyone[left : right + 1] = [placed[w][units // 2] for w in range(workers)]
    return [everyone[w::workers] for w in range(workers)]


def grab_epoch(order, gradients, mean, sign=greedy_sign):
    """GraB (Lu, Guo, De Sa 2022) with the stale mean: (next order, mean of this epoch)."""
    gradients = np.asarray(gradients, np.float64)
    following = [None] * len(order)
    left, right = 0, len(order) - 1
    total, gathered = np.zeros_like(mean, dtype=np.float64), np.zeros_like(mean, dtype=np.float64)
    for u in order:
        (s,), total = balance([gradients[u] - mean], total, sign)
        gathered += gradients[u]
        if s > 0:
            following[left], left = u, left + 1
        else:
            following[right], right = u, right - 1
    return following, gathered / len(order)


def unzip(order):
    return list(order[0::2]) + list(order[1::2])[::-1]


def greedy_order(vectors):
    """Greedy herding: always the vector that keeps the partial sum smallest."""
    centred = np.asarray(vectors, np.float64) - np.mean(vectors, axis=0)
    left, total, order = list(range(len(centred))), np.zeros(centred.shape[1]), []
    while left:
        best = min(left, key=lambda u: np.sum((total + centred[u]) ** 2))
        total = total + centred[best]
        left.remove(best)
        order.append(best)
    return order


def parallel_herding_bound(vectors, orders, norm=np.inf):
    vectors = np.asarray(vectors, np.float64)
    mean = vectors.mean(axis=(0, 1))
    total, bound = np.zeros(vectors.shape[2]), 0.0
    for k in range(vectors.shape[1]):
        for w in range(vectors.shape[0]):
            total = total + vectors[w, orders[w][k]] - mean
        bound = max(bound, np.linalg.norm(total, norm))
    return bound


def warmup_cosine(peak, warmup_steps, total_steps, floor):
    """The published recipes' learning rate, as a function of the step: linear, then cosine."""

    def lr(t):
        if t < warmup_steps:
            return peak * t / warmup_steps
        share = (t - warmup_steps) / (total_steps - warmup_steps)
        return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * share))

    return lr


def qsr_asked(lr, total_steps, alpha, h_base, power=2, warmup_steps=0, h_max=math.inf):
    """The longest round that each step allows; the steps of a rise allow what its top does."""
    asked, top = [], 0.0
    for t in reversed(range(total_steps)):
        rises = t + 1 < total_steps and lr(t + 1) > lr(t)
        top = top if rises else lr(t)
        grown = (alpha / top) ** power if top > 0 else math.inf
        grown = min(grown, total_steps)  # it may be infinite; no round is longer
        h = min(max(int(grown), h_base), h_max)
        if t < warmup_steps:
            h = min(h, asked[-1]) if asked and warmup_steps < total_steps else h_base
        asked.append(h)
    return asked[::-1]


def qsr_rounds(lr, total_steps, **rule):
    """Starts of the rounds of the Quadratic Synchronization Rule (Gu et al. 2024), one by one.

    A round takes one step after the other, as long as none of them allows less.
    """
    asked = qsr_asked(lr, total_steps, **rule)
    starts, t = [], 0
    while t < total_steps:
        starts.append(t)
        h, least = 1, asked[t]
        while t + h < total_steps and h + 1 <= min(least, asked[t + h]):
            least = min(least, asked[t + h])
            h += 1
        t += h
    return starts


def weighted_mean(rows, weights):
    """sum w x / sum w, over the workers that count: [W, ...] -> [...]."""
    total, over = 0.0, 0.0
    for row, w in zip(rows, weights, strict=True):
        if w > 0:
            total = total + np.float64(w) * np.asarray(row, np.float64)
            over += np.float64(w)
    return total / over


def stochastic_echo(p, uniforms):
    """Algorithm 1 of the echoing paper: the steps that load, by coins uniform in [0, 1)."""
    fresh = []
    for t in range(len(uniforms)):
        if t == 0 or uniforms[t] < p(t):
            fresh.append(True)  # load a batch
        else:
            fresh.append(False)  # use the last one again
    return fresh


def error_diffusion(shares):
    """The steps that load; exact for shares that are `fractions.Fraction`."""
    fresh, acc = [], 1 - shares[0]
    for share in shares:
        acc += share
        load = acc >= 1
        if load:
            acc -= 1
        fresh.append(load)
    return fresh


def loads_used(fresh):
    """The number of the load that each step uses."""
    used, load = [], -1
    for f in fresh:
        if f:
            load += 1
        used.append(load)
    return used


def load_if_ready(ready, max_factor):
    """The steps that load, and those that had to ask; ready[t] is the answer in step t."""
    fresh, asked, uses = [], [], 0
    for t in range(len(ready)):
        if t == 0 or uses == max_factor:
            load = True
        else:
            asked.append(t)
            load = ready[t]
        uses = 1 if load else uses + 1
        fresh.append(load)
    return fresh, asked


def hash_bits(seed, place):
    """32 bits of `ordering.gradients.linear.hash_bits`, in Python's integers."""
    x = place * 0x9E3779B1 % 2**32 ^ seed % 2**32
    for shift, factor in ((16, 0x21F0AAAD), (15, 0xD35A2D97)):
        x = (x ^ x >> shift) * factor % 2**32
    return x ^ x >> 15


def sketch_side(seed, side, length, sizes):
    """u or v of a matrix: [n, m, sums], entry by entry."""
    sums, residues = sizes.sums[side], sizes.residues[side]
    each = sizes.groups // sizes.read
    order = sorted(range(sums * each), key=lambda i: hash_bits(seed + 2 + side, i))
    result, transform = np.zeros((length, sizes.groups, sums)), hadamard(sizes.groups)
    near = range(sizes.read)
    for a in range(length):
        turn, residue = divmod(a, residues)
        bits = [hash_bits(seed + 4 + side, turn // sizes.read * sizes.read + i) for i in near]
        rank = sorted(bits).index(bits[turn % sizes.read])
        first = rank ^ hash_bits(seed + 8 + side, residue) % sizes.read
        p, second = divmod(order[residue], each)
        sign = 1 - 2 * (hash_bits(seed + 6 + side, a) >> 31)
        result[a, :, p] = sign * transform[:, first * each + second]
    return result


def sketch_sides(seed, shape, sizes):
    return [sketch_side(int(seed), side, n, sizes) for side, n in enumerate(shape)]


def scale(moments, floor, power=0.5):
    """What scaled orders multiply gradients with: one over a power of v in units of its mean."""
    mean = np.mean(np.concatenate([np.ravel(v) for v in moments]))
    return [1 / ((v / mean) ** power + floor) if mean else np.ones_like(v) for v in moments]


def factored_scale(moment, mean, floor):
    """The same of a matrix, from the means of its rows and of its columns (Adafactor)."""
    result = np.zeros(moment.shape)
    for r, c in np.ndindex(moment.shape):
        row = np.sqrt(np.mean(moment[r]) / np.mean(moment)) + floor
        result[r, c] = 1 / (row * (np.sqrt(np.mean(moment[:, c]) / mean) + floor))
    return result


def four_means(values):
    """The quantiser of SparseLoCo's code with four bins in six deviations, value by value."""
    mean = np.mean(values)
    deviation = np.sqrt(np.sum((values - mean) ** 2) / (values.size - 1))
    scale = 6 * deviation / 4 if deviation else 1.0
    codes = np.clip(np.round((values - mean) / scale + 2), 0, 3)
    result = np.zeros(values.shape)
    for code in set(codes.ravel().tolist()):
        result[codes == code] = mean + np.mean(values[codes == code] - mean)
    return result


def rounded_to_bits(rows, bits, least):
    """The nearest floats of so many bits, whose smallest normal exponent is `least`."""
    exponent = np.floor(np.log2(np.maximum(np.abs(rows), 2.0**least)))
    unit = 2.0 ** (exponent - bits + 1)
    return np.round(rows / unit) * unit


def in_bfloat16(rows):
    return rounded_to_bits(rows, 8, -126)


def rounded_to_codes(rows, most):
    """Codes of -most to most, with a scale for each row."""
    top = np.abs(rows).max(axis=1, keepdims=True)
    scale = in_bfloat16(np.float32(np.float32(top) * np.float32(1.00390625 / most)))
    return scale * np.clip(np.round(rows / np.where(scale == 0, 1, scale)), -most, most)


def largest(rows, quantised):
    """The 64 largest of each block of 4096, the first 64 blocks and so on quantised together."""
    blocks = rows.reshape(-1, 4096)
    sent = np.argsort(-np.abs(blocks), axis=1, kind="stable")[:, :64]
    result = np.zeros(blocks.shape)
    for start in range(0, len(blocks), 64):
        at = np.arange(start, min(start + 64, len(blocks)))[:, None]
        at = at, sent[at[:, 0]]
        result[at] = quantised(blocks[at])
    return in_bfloat16(result).reshape(rows.shape)


ROUNDED = {  # what is left of float64 rows [r, 128] after a compressor, number by number
    "bfloat16": in_bfloat16,
    "float16": lambda rows: rounded_to_bits(rows, 11, -14),
    "int8": lambda rows: rounded_to_codes(rows, 127),
    "int4": lambda rows: rounded_to_codes(rows, 7),
    "top_k": lambda rows: largest(rows, np.asarray),
    "top_k_2bit": lambda rows: largest(rows, four_means),
}


def synchronize_changes(anchor, changes, lost, compressor, rounded, weights=None):
    """Changes [W, D] with error feedback: (the parameters [D] of all, what is lost [W, D]).

    `rounded` is what is left of rows [r, 128] after the compressor, one of ROUNDED.
    Changes count by weights [W], those of a worker with weight zero not at all.

    Worker w sends its changes to those who average them, each a slice, and keeps what was rounded
    off; who averages sends the mean on, and keeps what that loses, W times. SparseLoCo (Sarfi et
    al. 2025) gathers everything instead.
    """
    workers, size = changes.shape
    unit = 128 * compressor.multiple * (1 if compressor.gathers else workers)
    weights = np.ones(workers) if weights is None else np.asarray(weights, np.float64)
    sent = np.zeros((workers, size))
    for w, weight in enumerate(weights):
        sent[w] = compressor.feedback * lost[w]
        if weight > 0:
            sent[w] += workers * weight / weights.sum() * np.asarray(changes[w], np.float64)
    sent = np.pad(sent, ((0, 0), (0, -size % unit)))
    got = np.stack([rounded(c.reshape(-1, 128)).ravel() for c in sent])
    lost = sent - got
    if compressor.gathers:
        return anchor + got.mean(axis=0)[:size], lost[:, :size]
    mean, each = np.zeros(sent.shape[1]), sent.shape[1] // workers
    for w in range(workers):
        mine = slice(w * each, (w + 1) * each)
        average = sum(got[v][mine] if v != w else sent[v][mine] for v in range(workers)) / workers
        mean[mine] = rounded(average.reshape(-1, 128)).ravel()
        lost[w][mine] = workers * (average - mean[mine])
    return anchor + mean[:size], lost[:, :size]


def aligned_ends(ends, fresh, every):
    """The ends of rounds that wait for a whole multiple of `every` loads, step by step."""
    marks, k = set(), 1
    while math.floor(k * every + 0.5) <= sum(fresh):
        marks.add(math.floor(k * every + 0.5))
        k += 1
    results, loads, due = [], 0, False
    for t in range(len(fresh)):
        loads += bool(fresh[t])
        due = due or t + 1 in ends
        last = t + 1 == len(fresh)
        if last or (due and loads in marks and fresh[t + 1]):
            results.append(t + 1)
            due = False
    return results


def redistributed(orders, workers, units_per_step):
    """Every step's units, worker after worker, dealt to `workers` in turn: their orders."""
    new = [[] for _ in range(workers)]
    for start in range(0, len(orders[0]), units_per_step):
        step = [u for order in orders for u in order[start : start + units_per_step]]
        each = len(step) // workers
        for w in range(workers):
            new[w] += step[w * each : (w + 1) * each]
    return new


def epoch_mean(weights, t, steps):
    """The mean of x_k over the steps so far of the epoch of step t; weights: x_1, x_2, ..."""
    return np.mean(weights[(t - 1) // steps * steps : t], axis=0)


def debiased_ema(weights, t, decay):
    """Kingma, Ba 2015, section 3: (1 - d) sum_k d^(t-k) x_k / (1 - d^t), k = 1 .. t."""
    total = sum((1 - decay) * decay ** (t - k) * weights[k - 1] for k in range(1, t + 1))
    return total / (1 - decay**t)


def late_mean(weights, t, steps, total):
    """Of x_k, k <= t, at the last four epochs' ends of `total` steps, weighed by 1 to 4; or x_t."""
    ends = [total - total % steps - back * steps for back in (3, 2, 1, 0)]
    past = [(i, weights[k - 1]) for i, k in enumerate(ends, 1) if k <= t] or [(1, weights[t - 1])]
    return sum(i * x for i, x in past) / sum(i for i, _ in past)


def scored_order(scores, pattern, *, layers=1, sections=1, radius=0.0):
    """Units in the published patterns of their scores (Dai et al. 2026)."""
    ranked = sorted(range(len(scores)), key=lambda unit: scores[unit])

    def layered(units, turns):
        result = []
        for layer in range(layers):
            chosen = [unit for i, unit in enumerate(units) if i % layers == layer]
            result += chosen[::-1] if turns and layer % 2 else chosen
        return result

    if pattern in ("folded", "zigzag"):
        return layered(ranked, pattern == "zigzag")
    if pattern in ("stairs", "saw"):
        size, result = len(ranked), []
        half = round(size * radius)
        for section in range(1, sections):
            border = round(size * section / sections)
            while len(result) < border - half:
                result.append(ranked[len(result)])
            result += layered(ranked[len(result) : border + half], pattern == "saw")
        return result + ranked[len(result) :]
    return ranked


def mixture_counts(shares, batch_size, left, exhausted, owed):
    """Examples of each source in every step, one by one to the source that is owed most.

    Shares and what is owed are Fractions. Raises LookupError(step) if no source may fill a step.
    """
    left, sources, rows, owed = list(left), range(len(left)), [], list(owed)
    stops = exhausted == "stop"
    for t, share in enumerate(shares):
        if stops and 0 in left:
            share = [p * (n > 0) for p, n in zip(share, left, strict=True)]
            if not sum(share):
                raise LookupError(t)
            share = [p / sum(share) for p in share]
            lost = sum(owed[s] for s in sources if not left[s])
            owed = [(owed[s] + lost * share[s]) * (left[s] > 0) for s in sources]
        target, row = [owed[s] + batch_size * share[s] for s in sources], [0] * len(left)
        for _ in range(batch_size):
            now = [math.floor((target[s] - row[s]) * 2**20 + Fraction(1, 2)) for s in sources]
            able = [s for s in sources if row[s] < left[s] or not stops]
            able = [s for s in able if share[s] or now[s] > 0]
            if not able:
                raise LookupError(t)
            row[max(able, key=now.__getitem__)] += 1
        if exhausted == "end" and any(row[s] > left[s] for s in sources):
            return rows
        owed = [target[s] - row[s] for s in sources]
        left = [left[s] - row[s] for s in sources]
        rows.append(row)
    return rows
