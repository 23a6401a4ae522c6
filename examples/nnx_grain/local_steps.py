"""plain.py with local steps: four workers average their weights where QSR says."""

import functools

import grain
import jax
import numpy as np
import optax
from flax import nnx
from sklearn import datasets

from syncopate import local_opt

EPOCHS, BATCH, TRAIN = 10, 32, 1437
SPECS = {"in_specs": ("worker", "worker", "batch"), "out_specs": ("worker", "worker", "mean")}


class CNN(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, 16, kernel_size=(3, 3), rngs=rngs)
        self.conv2 = nnx.Conv(16, 16, kernel_size=(3, 3), rngs=rngs)
        self.avg_pool = functools.partial(nnx.avg_pool, window_shape=(2, 2), strides=(2, 2))
        self.linear = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x):
        x = self.avg_pool(nnx.relu(self.conv1(x)))
        x = self.avg_pool(nnx.relu(self.conv2(x)))
        return self.linear(x.reshape(x.shape[0], -1))


def loss_fn(model, batch):
    logits = model(batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


@functools.partial(jax.jit, donate_argnames=("model", "optimizer"))
@functools.partial(local_opt.map_workers, workers=4, **SPECS)
def train_step(model, optimizer, batch):
    grad_fn = nnx.value_and_grad(loss_fn)
    loss, grads = grad_fn(model, batch)
    optimizer.update(model, grads)
    return model, optimizer, loss


@nnx.jit
def eval_step(model, batch):
    right = model(batch["image"]).argmax(1) == batch["label"]
    return {"loss": loss_fn(model, batch), "accuracy": right.mean()}


def load():
    digits = datasets.load_digits()
    images, labels = digits.images[..., None].astype(np.float32) / 16, digits.target
    examples = [{"image": x, "label": y} for x, y in zip(images, labels, strict=True)]
    examples = [examples[i] for i in np.random.default_rng(0).permutation(len(examples))]
    return map(grain.MapDataset.source, (examples[:TRAIN], examples[TRAIN:]))


def evaluate(model, examples):
    (batch,) = examples.batch(len(examples))
    return jax.tree.map(float, eval_step(model, batch))


def main(seed: int = 0, learning_rate: float = 0.05, epochs: int = EPOCHS) -> dict:
    train, valid = load()
    model = CNN(nnx.Rngs(seed))
    steps, alpha = epochs * (TRAIN // BATCH), 2 * learning_rate
    rate = optax.cosine_decay_schedule(learning_rate, steps)
    plan = local_opt.qsr(rate, total_steps=steps, alpha=alpha, h_base=4)
    tx = local_opt.local_steps(optax.sgd(rate, 0.9), plan)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    model, optimizer = local_opt.replicate((model, optimizer), 4)
    metrics = nnx.metrics.Average("loss")
    losses = []
    for epoch in range(epochs):
        metrics.reset()
        for batch in train.shuffle(seed=1000 * seed + epoch).batch(BATCH, drop_remainder=True):
            model, optimizer, loss = train_step(model, optimizer, batch)
            metrics.update(loss=loss)
        losses.append(float(metrics.compute()))
        print(epoch + 1, losses[-1])
    model = local_opt.mean_over_workers(model)
    return {"losses": losses, "train": evaluate(model, train), "valid": evaluate(model, valid)}


if __name__ == "__main__":
    print(main())
