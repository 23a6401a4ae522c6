"""plain.py in orders that balance gradients: every epoch makes the order of the next."""

import functools

import grain
import jax
import numpy as np
import optax
from flax import nnx
from sklearn import datasets

from syncopate import ordering

EPOCHS, BATCH, TRAIN = 10, 32, 1437
ORDER = ordering.pair_balance(TRAIN, units_per_step=BATCH)


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


@nnx.jit
def train_step(model, optimizer, metrics, orders, batch):
    grad_fn = ordering.per_example_grads(lambda p, b: loss_fn(nnx.merge(nnx.graphdef(model), p), b))
    loss, grads, rows = grad_fn(nnx.state(model, nnx.Param), batch)
    metrics.update(loss=loss)
    optimizer.update(model, grads)
    return ORDER.observe(orders, rows)


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
    tx = optax.sgd(optax.cosine_decay_schedule(learning_rate, epochs * -(-TRAIN // BATCH)), 0.9)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    metrics = nnx.metrics.Average("loss")
    losses, orders = [], ORDER.init(jax.random.key(seed), nnx.state(model, nnx.Param))
    for epoch in range(epochs):
        metrics.reset()
        for batch in ordering.data.grain_dataset(train, orders.current).batch(BATCH):
            orders = train_step(model, optimizer, metrics, orders, batch)
        orders = ORDER.next_epoch(orders)
        losses.append(float(metrics.compute()))
        print(epoch + 1, losses[-1])
    return {"losses": losses, "train": evaluate(model, train), "valid": evaluate(model, valid)}


if __name__ == "__main__":
    print(main())
