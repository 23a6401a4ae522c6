"""Published methods in NumPy, from the pseudocode of their papers: slow, and meant to be read."""

import numpy as np


def orthogonal(matrix, steps=5):
    """Muon's Newton-Schulz iteration (Jordan et al. 2024)."""
    flat = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if flat else matrix) / (np.linalg.norm(matrix) + 1e-8)
    for _ in range(steps):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if flat else x


def muloco(params, grads, periods, rate, outer, decay):
    """Algorithm 1 of MuLoCo (Thérien et al. 2025) on {name: array}: every name after each sync.

    grads [T, W] of dicts; outer: (rate, momentum); matrices step by Muon, the others by AdamW.
    """
    workers = len(grads[0])
    anchor = {n: np.array(x, np.float64) for n, x in params.items()}
    velocity = {n: 0.0 for n in params}
    u, v = ([dict.fromkeys(params, 0.0) for _ in range(workers)] for _ in range(2))
    t, history = 0, []
    for h in periods:
        own = [{n: x.copy() for n, x in anchor.items()} for _ in range(workers)]
        for _ in range(h):
            for w in range(workers):
                for n, g in grads[t][w].items():
                    g = np.asarray(g, np.float64)
                    u[w][n] = 0.9 * u[w][n] + 0.1 * g
                    first = u[w][n] / (1 - 0.9 ** (t + 1))
                    if g.ndim == 2:
                        step = orthogonal(first) * max(1, g.shape[1] / g.shape[0]) ** 0.5
                    else:
                        v[w][n] = 0.99 * v[w][n] + 0.01 * g**2
                        step = first / (np.sqrt(v[w][n] / (1 - 0.99 ** (t + 1))) + 1e-8)
                    own[w][n] = own[w][n] - rate * (step + decay * own[w][n])
            t += 1
        for n in params:
            delta = anchor[n] - sum(x[n] for x in own) / workers
            velocity[n] = outer[1] * velocity[n] + outer[0] * delta
            anchor[n] = anchor[n] - outer[1] * velocity[n] - outer[0] * delta
        history.append({n: x.copy() for n, x in anchor.items()})
    return history


def slowmo(params, gradient, periods, rates, outer):
    """Algorithm 1 of SlowMo (Wang et al. 2020) over SGD: x [T, W, D] after every step.

    rates: of every step, whose last in a round is gamma; outer: (alpha, beta).
    """
    x = np.array(params, np.float64)
    anchor, u, t, history = x[0].copy(), 0.0, 0, []
    for h in periods:
        for _ in range(h):
            grads = [gradient(w, t, x[w]) for w in range(len(x))]
            x = x - rates[t] * np.stack(grads)
            t += 1
            history.append(x)
        u = outer[1] * u + (anchor - x.mean(axis=0)) / rates[t - 1]
        anchor = anchor - outer[0] * rates[t - 1] * u
        x = np.stack([anchor] * len(x))
        history[-1] = x
    return np.stack(history)
