"""Our LeNet and ViT in PyTorch, with our parameters, and the timing of PyTorch's packages.

`rows_of` first compares the mean gradient of every way with ours, and its norms or projections with
the exact gradients of examples. Then all ways take turns in one process, PyTorch with as many
threads as XLA has. `megabytes` is by how much the memory of the process grows at most in a call, as
Linux counts it: one measure for both frameworks.
"""

import ctypes
import functools
import importlib
import os
import pathlib
import re
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

import ordering
from benchmarks import timing

EXAMPLES, SIZE = 16, 1024
HEADS, PATCH, EPSILON = 3, 4, 1e-6  # of the ViT in benchmarks/timing.py


def named(tree) -> dict[str, np.ndarray]:
    """Our parameters, or their gradients, by the names and in the shapes of PyTorch's."""
    arrays = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name, array = jax.tree_util.keystr(path, simple=True, separator="."), np.asarray(leaf)
        if "attention" in name:  # PyTorch's have one axis for all heads
            sizes = {".out.kernel": (-1, array.shape[-1]), ".bias": (-1,)}
            ends = (size for end, size in sizes.items() if name.endswith(end))
            array = array.reshape(next(ends, (len(array), -1)))
        if name.endswith("kernel"):
            array = array.transpose(3, 2, 0, 1) if array.ndim == 4 else array.T
        name = re.sub("(kernel|scale)$", "weight", name).replace("attention.", "")
        arrays[name.replace("positions", "positions.weight")] = np.ascontiguousarray(array)
    return arrays


def model_of(name: str, params):
    """The module, with these parameters."""
    import torch

    torch.set_num_threads(os.cpu_count() or 1)
    module = {"lenet": _lenet, "vit": _vit}[name](params)
    weights = {key: torch.from_numpy(array.copy()) for key, array in named(params).items()}
    module.load_state_dict(weights)
    return module


def _lenet(params):
    from torch import nn
    from torch.nn.functional import max_pool2d, relu

    class LeNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1 = nn.Conv2d(1, 6, 5, padding=2)
            self.conv2 = nn.Conv2d(6, 16, 5)
            self.dense1, self.dense2 = nn.Linear(400, 120), nn.Linear(120, 84)
            self.dense3 = nn.Linear(84, 10)

        def forward(self, x):
            # Reshaped, not permuted: channels would else be last in memory, for which opacus 1.6
            # computes wrong gradients of examples in the second convolution.
            x = x.reshape(len(x), 1, *x.shape[1:3])
            for conv in (self.conv1, self.conv2):
                x = max_pool2d(relu(conv(x)), 2)
            x = x.permute(0, 2, 3, 1).flatten(1)
            return self.dense3(relu(self.dense2(relu(self.dense1(x)))))

    return LeNet()


def _vit(params):
    import torch
    from torch import nn
    from torch.nn import functional

    width, hidden = params["block0"]["dense1"]["kernel"].shape
    depth = sum(name.startswith("block") for name in params)

    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(params["positions"].shape))

        def forward(self, x):
            return x + self.weight

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = (nn.LayerNorm(width, eps=EPSILON) for _ in range(2))
            self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
            self.dense1, self.dense2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

        def forward(self, x):
            h = self.norm1(x)
            heads = (
                layer(h).unflatten(-1, (HEADS, -1)).transpose(1, 2)
                for layer in (self.query, self.key, self.value)
            )
            h = functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
            x = x + self.out(h)
            h = functional.gelu(self.dense1(self.norm2(x)), approximate="tanh")
            return x + self.dense2(h)

    class ViT(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Linear(len(params["embed"]["kernel"]), width)
            self.positions = Positions()
            for i in range(depth):
                setattr(self, f"block{i}", Block())
            self.norm = nn.LayerNorm(width, eps=EPSILON)
            self.dense = nn.Linear(width, params["dense"]["kernel"].shape[1])

        def forward(self, x):
            x = x.unflatten(2, (-1, PATCH)).unflatten(1, (-1, PATCH)).transpose(2, 3)
            x = self.positions(self.embed(x.flatten(3).flatten(1, 2)))
            for i in range(depth):
                x = getattr(self, f"block{i}")(x)
            return self.dense(self.norm(x).mean(1))

    return ViT()


def losses_of(module, x, y):
    from torch.nn.functional import cross_entropy

    return cross_entropy(module(x), y, reduction="none")


def mean_gradient(module, x, y):
    """PyTorch's plain step: {name: gradient}."""
    module.zero_grad(set_to_none=True)
    losses_of(module, x, y).mean().backward()
    return {name: p.grad for name, p in module.named_parameters()}, None


def peak_growth(call: Callable) -> int:
    """Bytes by which the resident memory grows during a call, at its peak."""
    ctypes.CDLL(None).malloc_trim(0)
    before = _resident("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    jax.block_until_ready(call())
    return _resident("VmHWM") - before


def _resident(field: str) -> int:
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"{field}:\s+(\d+)", status)[1])


def check(way: str, result: tuple, plain: dict, exact: np.ndarray) -> None:
    """Raises AssertionError if mean gradient, norms or products of projections are wrong."""
    mean, rows = result
    scale = max(np.abs(array).max() for array in plain.values())
    for name, array in (mean or {}).items():
        np.testing.assert_allclose(
            array, plain[name], rtol=1e-3, atol=1e-4 * scale, err_msg=f"{way}: {name}"
        )
    if rows is None:
        return
    rows, norms = np.asarray(rows), np.linalg.norm(exact, axis=1)
    if rows.ndim == 1:
        return np.testing.assert_allclose(rows, norms, rtol=1e-3, err_msg=way)
    products = rows @ rows.T - exact @ exact.T
    error = np.sqrt(np.mean((products / np.outer(norms, norms)) ** 2))
    if not error < 4 / rows.shape[1] ** 0.5:
        raise AssertionError(f"{way}: inner products are off by {error:.3f} of the norms")


def rows_of(name: str, peers: Callable, repeats: int) -> Iterator[dict]:
    """Rows of one model. `peers(module)` is {way: (x, y) -> (mean gradient, norms or rows)}."""
    import torch

    task, key = timing.step_task(name), jax.random.key(0)
    params, loss = task.model.init(key), task.model.loss
    batch = jax.tree.map(lambda x: jnp.asarray(x[:EXAMPLES]), task.train)
    x, y = (torch.from_numpy(task.train[part][:EXAMPLES].copy()) for part in "xy")

    def plain(params, batch):
        return jax.grad(lambda p: jnp.mean(loss(p, batch, jax.random.key(0))))(params), None

    def sketched(params, batch):
        gradients = ordering.sketched_grads(loss, jax.random.key(1), size=SIZE)
        _, mean, rows = gradients(params, batch, key=jax.random.key(0))
        return mean, rows

    ours = {"plain step, JAX": jax.jit(plain), "ordering.sketched_grads": jax.jit(sketched)}
    calls = {way: functools.partial(run, params, batch) for way, run in ours.items()}
    first = functools.partial(mean_gradient, model_of(name, params))
    theirs = {"plain step, PyTorch": first, **peers(model_of(name, params))}
    per_example = ordering.per_example_grads(loss)
    formed = jax.jit(lambda *args: per_example(*args, key=key)[2])(params, batch)
    exact = np.concatenate([np.reshape(g, (EXAMPLES, -1)) for g in jax.tree.leaves(formed)], 1)
    results = {way: call() for way, call in calls.items()}
    results = {way: (named(mean), rows) for way, (mean, rows) in results.items()}
    for way, run in theirs.items():
        calls[way] = functools.partial(run, x, y.long())
        results[way] = calls[way]()
    for way, given in results.items():
        check(way, given, results["plain step, JAX"][0], exact)
    growth = {way: peak_growth(call) for way, call in calls.items()}
    for way, seconds, times in timing.compared(calls, repeats):
        base = times["plain step, JAX" if way in ours else "plain step, PyTorch"]
        yield {
            "model": name,
            "way": way,
            "ms": f"{seconds * 1e3:.2f}",
            "times its plain step": f"{base[0]:.2f}",
            "interval": "{1:.2f} to {2:.2f}".format(*base),
            "times ours": f"{times['ordering.sketched_grads'][0]:.2f}",
            "megabytes": f"{growth[way] / 1e6:.1f}",
        }


def main(package: str, peers: Callable, *, repeats: int) -> None:
    """The program of a package: its rows, if it is installed."""
    flags.DEFINE_list("models", ["lenet", "vit"], "of benchmarks/torch_models.py")
    flags.DEFINE_integer("repeats", repeats, "timed calls of every way")

    def rows() -> Iterator[dict]:
        try:
            importlib.import_module(package)
        except ImportError as error:
            return print(f"{package} is left out: {error}")
        for name in flags.FLAGS.models:
            yield from rows_of(name, peers, flags.FLAGS.repeats)

    def run(argv):
        del argv
        timing.print_rows(rows())

    app.run(run)
