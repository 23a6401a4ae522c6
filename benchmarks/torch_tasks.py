"""What other packages with orders train on, and an epoch of it in PyTorch.

An epoch is SGD with momentum 0.9 on the mean gradient of a step's examples, which lie in memory.
`torch.func` computes gradients of single examples, as in the packages' scripts, and autograd those
of batches.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import models
from benchmarks import bench
from experiments.compare import recipes

MOMENTUM = 0.9
SIZES = ((4, 16, 40), (32, 2, 640), (64, 4, 640), (4, 16, 10_000))  # W, units of each, parameters
EPOCHS = {"softmax": 42, "hmda": 16, "lenet": 25}  # of every way; the first compiles and warms up


class Problem(NamedTuple):
    name: str  # of MODELS
    x: np.ndarray  # [W, M, ...]
    y: np.ndarray  # [W, M]
    step: int  # units of every worker in a step
    rate: float

    @property
    def model(self) -> models.Model:
        return MODELS[self.name][0](self.x.shape[2:])

    @property
    def start(self) -> dict:
        return self.model.init(jax.random.key(0))

    @property
    def parameters(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(self.start))

    def alone(self) -> "Problem":
        """The same batches, of one worker."""
        workers, units = self.y.shape
        x, y = (v.reshape(1, workers * units, *v.shape[2:]) for v in (self.x, self.y))
        return self._replace(x=x, y=y, step=workers * self.step)


def softmax(workers: int, units: int, parameters: int) -> Problem:
    """Softmax regression of ten classes on random examples, two of every worker in a step."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(workers, units, parameters // 10 - 1)).astype(np.float32)
    return Problem("softmax", x, rng.integers(0, 10, (workers, units)), 2, 0.01)


def whole_numbers(shape: tuple[int, int, int], step: int) -> Problem:
    """Gradients of whole numbers [W, M, D], whose sums are the same in any order."""
    x = np.random.default_rng(1).integers(-3, 4, shape).astype(np.float32)
    return Problem("linear", x, np.zeros(shape[:2], int), step, 0.01)


def load(name: str, data_dir: str | None) -> Problem:
    """A row of `bench.EPOCHS` with four workers, in batches of as many single examples.

    HMDA has only its first 32,768 examples, so that an epoch of the other packages takes seconds.
    LeNet's rate is ten times its recipe's, which has 50 times as many steps in an epoch.
    """
    row, first, batch, times = {
        "hmda": ("hmda", 32_768, 16, 1),
        "lenet": ("lenet_4", 1024, 64, 10),
    }[name]
    task_name, folder, choices, *_ = bench.EPOCHS[row]
    folder = None if data_dir is None else os.path.join(data_dir, folder)
    task, recipe = recipes.load(task_name, folder, **choices)
    workers, (rate,) = 4, recipe.learning_rates
    number = len(task.train["y"][:first]) // batch * batch
    x, y = (v[:number].reshape(workers, -1, *v.shape[1:]) for v in map(task.train.get, "xy"))
    return Problem(name, x, y, batch // workers, times * rate)


def problems(names: Iterable[str], data_dir: str | None) -> Iterator[Problem]:
    """The problems of these names; one without its data is left out."""
    for name in names:
        if name == "softmax":
            yield from (softmax(*sizes) for sizes in SIZES)
            continue
        if name not in EPOCHS:
            raise ValueError(f"--problems has {name}: pass some of {','.join(EPOCHS)}.")
        try:
            yield load(name, data_dir)
        except (ValueError, ImportError) as error:
            print(f"{name} is left out: {error}")


def _linear_model(shape) -> models.Model:
    (size,) = shape
    loss = lambda params, batch, key: batch["x"] @ params["w"]  # noqa: E731
    return models.Model(lambda key: {"w": jnp.zeros(size)}, loss, lambda params, x: x @ params["w"])


def _linear(params, x, y):
    return x @ params["w"]


def _logistic(params, x, y):
    from torch.nn.functional import binary_cross_entropy_with_logits

    return binary_cross_entropy_with_logits(x @ params["w"], y.to(x.dtype), reduction="none")


def _softmax(params, x, y):
    from torch.nn.functional import cross_entropy

    return cross_entropy(x @ params["w"] + params["b"], y, reduction="none")


def _lenet(params, x, y):
    from torch.nn import functional as nn

    layer = lambda name: (params[f"{name}.kernel"], params[f"{name}.bias"])  # noqa: E731
    for name in ("conv1", "conv2"):
        x = nn.max_pool2d(nn.relu(nn.conv2d(x, *layer(name))), 2)
    x = x.flatten(1)
    for name in ("dense1", "dense2"):
        x = nn.relu(nn.linear(x, *layer(name)))
    return nn.cross_entropy(nn.linear(x, *layer("dense3")), y, reduction="none")


# {problem: (shape of an example -> model, the losses [n] of (params, x, y) by PyTorch)}
MODELS = {
    "linear": (_linear_model, _linear),
    "softmax": (
        lambda shape: models.softmax_regression(num_features=shape[0], num_classes=10),
        _softmax,
    ),
    "hmda": (lambda shape: models.logistic_regression(num_features=shape[0]), _logistic),
    "lenet": (lambda shape: models.lenet(image_shape=shape), _lenet),
}


def to_torch(params) -> dict:
    """{name: tensor}, with kernels as PyTorch has them: outputs first, channels before pixels."""
    import torch

    def tensor(path, leaf):
        leaf = np.asarray(leaf)
        if path == "dense1.kernel":  # its inputs are 5 x 5 pixels of 16 channels
            leaf = leaf.reshape(5, 5, 16, -1).transpose(2, 0, 1, 3).reshape(leaf.shape)
        if path.endswith("kernel"):
            leaf = leaf.transpose(3, 2, 0, 1) if leaf.ndim == 4 else leaf.T
        return torch.from_numpy(leaf.copy())

    named = jax.tree_util.tree_leaves_with_path(params)
    paths = {jax.tree_util.keystr(at, simple=True, separator="."): leaf for at, leaf in named}
    return {path: tensor(path, leaf) for path, leaf in paths.items()}


def tensors(problem: Problem) -> tuple:
    """Inputs, images with their channels first, and classes."""
    import torch

    x = problem.x.transpose(0, 1, 4, 2, 3) if problem.x.ndim == 5 else problem.x
    return torch.from_numpy(x.copy()), torch.from_numpy(problem.y.astype(np.int64))


def in_torch(problem: Problem, begin: Callable, observe: Callable | None = None) -> Callable:
    """An epoch in PyTorch: () -> (params, orders).

    Args:
      begin: `() -> int64[W, M]`, the orders of the epoch that begins.
      observe: `(gradients {name: [W B, ...]}, places [B])`, called in every step. Without it,
        gradients of single examples are not computed.
    """
    import torch

    losses, (x, y) = MODELS[problem.name][1], tensors(problem)
    workers, units = y.shape
    worker = torch.arange(workers)[:, None]
    params = to_torch(problem.start)
    velocity = {name: torch.zeros_like(p) for name, p in params.items()}
    of_one = torch.func.grad(lambda params, x, y: losses(params, x[None], y[None])[0])
    of_all = torch.func.vmap(of_one, in_dims=(None, 0, 0))

    def mean_gradient(x, y, places):
        if observe is None:
            leaves = {name: p.requires_grad_() for name, p in params.items()}
            grads = torch.autograd.grad(losses(leaves, x, y).mean(), tuple(leaves.values()))
            return dict(zip(leaves, grads, strict=True))
        rows = of_all(params, x, y)
        observe(rows, places)
        return {name: row.mean(0) for name, row in rows.items()}

    def epoch():
        orders = begin()
        for place in range(0, units, problem.step):
            places = torch.arange(place, place + problem.step)
            at = (worker, orders[:, places])
            mean = mean_gradient(x[at].flatten(0, 1), y[at].flatten(), places)
            with torch.no_grad():
                for name, gradient in mean.items():
                    params[name].sub_(problem.rate * velocity[name].mul_(MOMENTUM).add_(gradient))
        return {name: p.detach().clone() for name, p in params.items()}, orders.numpy()

    return epoch


def random_in_torch(problem: Problem) -> Callable:
    """The epoch without an order: a new random one for every worker."""
    import torch

    generator, (workers, units) = torch.Generator().manual_seed(0), problem.y.shape

    def begin():
        return torch.stack([torch.randperm(units, generator=generator) for _ in range(workers)])

    return in_torch(problem, begin)


def loss_of(problem: Problem) -> Callable:
    """The mean loss over all examples, of parameters of either framework."""
    import torch

    x, y = (part.flatten(0, 1) for part in tensors(problem))

    def mean(params):
        if not all(isinstance(leaf, torch.Tensor) for leaf in jax.tree.leaves(params)):
            params = to_torch(params)
        with torch.no_grad():
            return float(MODELS[problem.name][1](params, x, y).double().mean())

    return mean


def check_models(problem: Problem) -> None:
    """Raises AssertionError unless losses and gradients of both frameworks agree at the start."""
    import torch

    start, model = problem.start, problem.model
    some = {"x": problem.x[:, :64], "y": problem.y[:, :64]}
    batch = {name: jnp.asarray(v.reshape(-1, *v.shape[2:])) for name, v in some.items()}

    def mean(params):
        return jnp.mean(model.loss(params, batch, jax.random.key(0)))

    params, some = to_torch(start), problem._replace(**some)
    np.testing.assert_allclose(loss_of(some)(params), mean(start), rtol=1e-5)
    leaves = {name: p.requires_grad_() for name, p in params.items()}
    x, y = (part.flatten(0, 1) for part in tensors(some))
    loss = MODELS[problem.name][1](leaves, x, y).mean()
    there = dict(zip(leaves, torch.autograd.grad(loss, tuple(leaves.values())), strict=True))
    for name, here in to_torch(jax.grad(mean)(start)).items():
        np.testing.assert_allclose(there[name], here, rtol=1e-4, atol=1e-6, err_msg=name)
