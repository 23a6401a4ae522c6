"""Digits inside MaxText's own DiLoCo step, with its period or with qsr.diff.

    git clone https://github.com/AI-Hypercomputer/maxtext && pip install drjax scikit-learn
    python examples/others/maxtext/run.py --maxtext=maxtext --learning_rates=0.01,0.03 --seeds=5
    (cd maxtext && git apply --unidiff-zero ../examples/others/maxtext/qsr.diff), and again

Only MaxText's trainers/diloco, state, sharding and schedule are loaded, because its configs and
models need packages for TPUs. Four simulated replicas train a perceptron.
"""

import argparse
import ast
import pathlib
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from scipy import stats
from sklearn.datasets import load_digits

STEPS, WORKERS, BATCH = 480, 4, 8
OUTER = {"diloco_outer_lr": 0.3, "diloco_outer_momentum": 0.9}  # MaxText's defaults
DECAY = {"warmup_steps_fraction": 0.1, "learning_rate_final_fraction": 0.1}  # its defaults, too


def load(root: pathlib.Path):
    """(diloco, TrainStateNNX, its schedule) of a clone, with stand-ins for what they import."""
    source = root / "src" / "maxtext"
    for name in ("", ".configs", ".common", ".utils", ".trainers"):
        package = types.ModuleType(f"maxtext{name}")
        package.__path__ = [str(source.joinpath(*name.split(".")[1:]))]
        sys.modules[f"maxtext{name}"] = package
    config = sys.modules["maxtext.configs.pyconfig"] = types.ModuleType("pyconfig")
    config.HyperParameters = object
    sys.modules["maxtext.configs"].pyconfig = config
    utils = sys.modules["maxtext.utils.maxtext_utils"] = types.ModuleType("maxtext_utils")
    kinds = types.SimpleNamespace(COSINE="cosine")
    utils.__dict__.update(
        jnp=jnp, optax=optax, types=types.SimpleNamespace(LearningRateScheduleType=kinds)
    )
    tree = ast.parse((source / "utils" / "maxtext_utils.py").read_text())
    tree.body = [n for n in tree.body if getattr(n, "name", "") == "create_learning_rate_schedule"]
    exec(compile(tree, "maxtext_utils.py", "exec"), utils.__dict__)  # noqa: S102
    from maxtext.common.train_state_nnx import TrainStateNNX
    from maxtext.trainers.diloco import diloco

    return diloco, TrainStateNNX, utils.create_learning_rate_schedule


class Net(nnx.Module):
    def __init__(self, rngs):
        self.hidden, self.out = nnx.Linear(64, 64, rngs=rngs), nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.hidden(x)))


def step(state, batch, key):
    del key

    def mean_loss(model, batch):
        losses = optax.softmax_cross_entropy_with_integer_labels(model(batch[0]), batch[1])
        return losses.mean()

    loss, grads = nnx.value_and_grad(mean_loss)(state.model, batch)
    state.optimizer.update(state.model, grads)
    return state, loss


def train(modules, data, rate: float, seed: int, period: int):
    """(syncs, test accuracy, parameters) of one run."""
    diloco, TrainStateNNX, schedule_of = modules
    config = types.SimpleNamespace(
        num_diloco_replicas=WORKERS,
        diloco_sync_period=period,
        enable_streaming_diloco=False,
        learning_rate=rate,
        lr_schedule_type="cosine",
        learning_rate_schedule_steps=STEPS,
        steps=STEPS,
        **OUTER,
        **DECAY,
    )
    x, y = data
    order = np.random.default_rng(seed).permutation(len(x))
    rows, rest = order[:1500], order[1500:]
    model = Net(nnx.Rngs(params=jax.random.key(seed)))
    optimizer = nnx.Optimizer(model, optax.sgd(schedule_of(config), momentum=0.9), wrt=nnx.Param)
    state, _ = diloco.build_diloco_state(config, lambda: TrainStateNNX(model, optimizer))
    run = jax.jit(diloco.build_diloco_train_step(config, step))
    rng, sums = np.random.default_rng(seed), []
    for t in range(STEPS):
        taken = rows[rng.integers(0, len(rows), (WORKERS, BATCH))]
        state, _ = run(state, (x[taken], y[taken]), jax.random.key(t))
        sums.append(float(state.params["hidden"]["kernel"].sum()))  # the global parameters'
    hidden, out = state.params["hidden"], state.params["out"]
    shown = jax.nn.relu(x[rest] @ hidden["kernel"] + hidden["bias"]) @ out["kernel"] + out["bias"]
    accuracy = float((shown.argmax(1) == y[rest]).mean())
    return int((np.diff(sums) != 0).sum()), accuracy, jax.tree.map(np.asarray, state.params)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--maxtext", type=pathlib.Path, required=True, help="a clone")
    parser.add_argument("--learning_rates", default="0.003,0.01,0.03,0.1")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--period", type=int, default=4, help="diloco_sync_period")
    parser.add_argument("--save", help="an .npz of the last run's parameters")
    args = parser.parse_args()
    digits, modules = load_digits(), load(args.maxtext)
    data = (digits.data / 16).astype(np.float32), digits.target.astype(np.int32)
    print("| rate | syncs | test accuracy |\n| --- | --- | --- |")
    for rate in map(float, args.learning_rates.split(",")):
        runs = [train(modules, data, rate, seed, args.period) for seed in range(args.seeds)]
        syncs, accuracies, params = zip(*runs, strict=True)
        middle, spread = 100 * np.mean(accuracies), 100 * stats.sem(accuracies)
        half = stats.t.ppf(0.975, args.seeds - 1) * spread
        print(f"| {rate:g} | {syncs[0]} | {middle:.2f} ± {half:.2f} |", flush=True)
    if args.save:
        np.savez(args.save, *jax.tree.leaves(params[-1]))


if __name__ == "__main__":
    main()
