"""Compressors: what they send and lose, and that with feedback nothing is lost for good."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

import local_opt
from local_opt import exchange, formats, mean
from tests import reference
from tests.cases import mostly_slow
from tests.problems import (
    COMPRESSORS,
    RUNS,
    SGD,
    W,
    assert_workers_bitwise_equal,
    copies,
    of_one,
    vmap,
)

RNG = np.random.default_rng(1)


def on_grid(*shape, scale=1.0):
    """Normal numbers whose sums and differences float32 holds exactly."""
    return np.float32(np.round(scale * RNG.normal(size=shape) * 2**21) / 2**21)


ANCHOR = {"a": on_grid(7), "b": on_grid(3, 200)}  # 607 numbers, of no multiple
CHANGES = [jax.tree.map(lambda a: on_grid(W, *a.shape, scale=0.01), ANCHOR) for _ in range(3)]


def send(compressor, changes, lost, run="vmap", anchor=ANCHOR, weights=None):
    """(the mean, what is lost) after workers have changed the anchor."""

    def one(change, lost, *weight):
        tree = jax.tree.map(jnp.add, anchor, change)
        relative = mean.averaged((), "worker", *(weight or [None])).relative_weight
        moved, lost = exchange.synchronize_changes(
            tree,
            axis_name="worker",
            anchor=anchor,
            compressor=compressor,
            residual=lost,
            relative_weight=relative,
        )
        return jax.tree.map(jnp.add, anchor, moved), lost

    more = () if weights is None else (np.float32(weights),)
    return jax.jit(RUNS[run](one))(changes, lost, *more)


def nothing(compressor):
    return jax.vmap(lambda tree: exchange.no_residual(tree, compressor))(CHANGES[0])


def rows(tree):
    """float64[W, 607], a worker's leaves one after the other."""
    leaves = [np.asarray(x, np.float64) for x in jax.tree.leaves(tree)]
    return np.concatenate([x.reshape(len(x), -1) for x in leaves], axis=1)


def assert_equal_but_for_ties(actual, expected):
    """To the rounding of float32, in which a number may lie half way between two codes.

    One such change is met again in the mean, in what is lost, and in the next sync.
    """
    error = np.abs(actual - expected)
    assert (error > 1e-6).sum() <= 4 and error.max() < W * 0.03 / 7  # one code of a large row


def rounded_by(name):
    """The slow reference of a compressor, or what it leaves of rows itself if it has none."""
    compressor = COMPRESSORS[name]

    def itself(rows):
        message = compressor.encode(jnp.asarray(rows, jnp.float32))
        return np.asarray(compressor.decode(message, len(rows)), np.float64)

    return reference.ROUNDED.get(name, itself)


SENT = [*itertools.product(COMPRESSORS, ("vmap", "shard_map"))]


# Shares of 1/2, 0, 1 and 5/2: exact, and the worker without one keeps and sends what it has lost.
@pytest.mark.parametrize("name,run", mostly_slow(SENT, quick=SENT[::3]))
def test_a_sync_equals_the_reference_worker_by_worker(name, run):
    """Two syncs: what the first has lost is sent by the second."""
    compressor, weights = COMPRESSORS[name], [1, 0, 2, 5] if run == "shard_map" else None
    lost, expected_lost = nothing(compressor), np.zeros((W, 607))
    for changes, each in zip(CHANGES[:2], [weights, weights and weights[::-1]], strict=True):
        new, lost = send(compressor, changes, lost, run, weights=each)
        assert_workers_bitwise_equal(new)
        expected, expected_lost = reference.synchronize_changes(
            rows(copies(ANCHOR))[0],
            rows(changes),
            expected_lost,
            compressor,
            rounded_by(name),
            each,
        )
        assert_equal_but_for_ties(rows(new)[0], expected)
        if compressor.feedback:
            assert_equal_but_for_ties(rows(lost), expected_lost)
    assert np.abs(expected_lost).max() > 1e-6 and (lost == ()) == (compressor.feedback == 0)


FULL = {
    "int8": COMPRESSORS["int8"],
    "int4": COMPRESSORS["int4"],
    "top_k": local_opt.top_k(1 / 64, feedback=1.0),
    "bfloat16": local_opt.quantize(jnp.bfloat16, feedback=1.0),
}


@pytest.mark.parametrize("name", mostly_slow(FULL, quick=("int4", "top_k")))
def test_with_full_feedback_all_that_was_sent_and_lost_is_what_workers_changed(name):
    """Under any weights, which differ from sync to sync."""
    compressor = FULL[name]
    anchor, lost = ANCHOR, nothing(compressor)
    weights = RNG.choice([0, 1, 3, 0.1], (len(CHANGES), W))
    weights[:, 0] = 1
    for changes, each in zip(CHANGES, weights, strict=True):
        new, lost = send(compressor, changes, lost, anchor=anchor, weights=each)
        anchor = jax.tree.map(lambda x: np.asarray(x[0]), new)
    means = [reference.weighted_mean(rows(c), v) for c, v in zip(CHANGES, weights, strict=True)]
    exact = rows(copies(ANCHOR))[0] + sum(means)
    result = rows(new)[0] + rows(lost).mean(axis=0)
    np.testing.assert_allclose(result, exact, rtol=0, atol=2e-6)  # roundings of float32
    assert np.abs(rows(new)[0] - exact).max() > 1e-5  # something is still on its way


@pytest.mark.parametrize("name", COMPRESSORS)
def test_a_message_has_the_size_and_type_that_its_compressor_says(name):
    """As many rows as it says, nothing for zeros, and numbers that are lost are seen."""
    compressor = COMPRESSORS[name]
    encode, decode = jax.jit(compressor.encode), jax.jit(compressor.decode, static_argnums=1)
    r = 130 * compressor.multiple
    x = jnp.asarray(RNG.normal(size=(r, 128)), jnp.float32)
    message = encode(x)
    assert message.shape == (compressor.message_rows(r), 128) and message.dtype == compressor.dtype
    again = decode(message, r)
    assert again.shape == x.shape and again.dtype == jnp.float32
    assert not decode(encode(jnp.zeros_like(x)), r).any()
    assert not np.isfinite(decode(encode(x.at[0, 5].set(jnp.nan)), r)[0]).all()


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 7, 8, 13, 16])
def test_numbers_of_any_bits_are_packed_in_that_many_and_come_back(bits):
    for m in (1, 8, 21):
        codes = RNG.integers(0, 2**bits, (m, 128)).astype(np.uint16)
        message = jax.jit(formats.packed, static_argnums=1)(codes, bits)
        assert len(message) == formats.packed_rows(m, bits) and message.dtype == jnp.uint8
        assert 0 <= 8 * len(message) - m * bits < 8 * bin(bits % 8).count("1") + 1
        result = jax.jit(formats.unpacked, static_argnums=(1, 2))(message, bits, m)
        np.testing.assert_array_equal(result, codes)


def test_a_block_of_sparseloco_takes_112_bytes():
    """And 64 blocks 8 more; what fills rows of 128 is below 1 kB a message."""
    compressor = COMPRESSORS["top_k_2bit"]
    assert 128 * compressor.message_rows(2048 * 32) == 2048 * 112 + 2048 // 64 * 8
    for n in (1, 2, 63, 65, 1000):
        assert 0 <= 128 * compressor.message_rows(n * 32) - 112 * n - 8 * -(-n // 64) < 1024


TWO_KINDS = [COMPRESSORS["int4"], local_opt.top_k(1 / 64, block=256)]


@pytest.mark.parametrize("compressor", mostly_slow(TWO_KINDS, quick=TWO_KINDS[:1]))
def test_groups_are_sent_as_each_of_them_alone(compressor, monkeypatch):
    """To the bit, however leaves are cut."""
    size = 128 * 128 * compressor.multiple * (16 if compressor.gathers else W)
    shapes = {"a": (size // 2,), "b": (3, size // 2), "c": (7,)}  # of two groups and a little
    change = {k: on_grid(W, *shape, scale=0.01) for k, shape in shapes.items()}
    anchor = {k: on_grid(*shape) for k, shape in shapes.items()}
    lost = jax.vmap(lambda x: exchange.no_residual(x, compressor))(change)
    parts = [(0, size), (size, 2 * size), (2 * size, 2 * size + 7)]
    alone = []
    for start, end in parts:
        local = rows(change)[:, start:end].astype(np.float32)
        cut = rows(copies(anchor))[0, start:end].astype(np.float32)
        alone.append(send(compressor, local, jnp.zeros_like(local), anchor=cut))
    monkeypatch.setattr(exchange, "GROUP", 1)
    monkeypatch.setattr(exchange, "GROUPS", 2**30)
    actual = send(compressor, change, lost, anchor=anchor)
    for tree, expected in zip(actual, zip(*alone, strict=True), strict=True):
        np.testing.assert_array_equal(rows(tree), np.concatenate(expected, axis=1))


def test_averaged_moments_are_never_rounded():
    rounds = local_opt.local_rounds(
        optax.adam(0.1), axis_name="worker", sync_opt_state="mean", compress=COMPRESSORS["int4"]
    )
    x, grads = copies(jnp.ones(3)), jnp.arange(3.0 * W).reshape(W, 3)
    state = jax.jit(jax.vmap(lambda x, g: rounds.update(g, rounds.init(x), x)[1]))(x, grads)
    _, after = jax.jit(vmap(rounds.sync))(x, state)
    np.testing.assert_allclose(after.inner[0].mu, copies(0.1 * grads.mean(axis=0)), rtol=1e-6)


@pytest.mark.parametrize("name", mostly_slow(("int8", "top_k"), quick=("top_k",)))
def test_one_worker_loses_what_its_compressor_drops_however_it_is_driven(name):
    """A sync keeps what was lost for the next one, so it must not be in the parameters as well."""
    compressor = COMPRESSORS[name]
    planned = local_opt.local_steps(SGD, local_opt.constant(2, total_steps=4), compress=compressor)
    rounds = local_opt.local_rounds(SGD, compress=compressor)
    x = y = jnp.linspace(-1.0, 1.0, 200)[None]
    state, local = vmap(planned.init)(x), vmap(rounds.init)(y)
    steps = [jax.jit(vmap(opt.update)) for opt in (planned, rounds)]
    sync = jax.jit(vmap(rounds.sync))
    for t in range(1, 5):
        grads = jnp.sin(t * jnp.arange(200.0))[None]
        updates, state = steps[0](grads, state, x)
        x = optax.apply_updates(x, updates)
        updates, local = steps[1](grads, local, y)
        y = optax.apply_updates(y, updates)
        if t % 2 == 0:
            y, local = sync(y, local)
            np.testing.assert_allclose(x, y, rtol=0, atol=1e-6)


TWO_AXES = [*itertools.product(("none", "int8", "top_k"), ("vmap", "shard_map"))]


@pytest.mark.parametrize("name,inside", mostly_slow(TWO_AXES, quick=TWO_AXES[::3]))
def test_workers_of_two_axes_send_what_those_of_one_do(name, inside):
    x = np.float32(RNG.normal(size=(2, 3, 200)))

    def sync(axis_name, x, weight):
        how = {"axis_name": axis_name, "compress": COMPRESSORS.get(name)}
        rounds = local_opt.local_rounds(SGD, outer=optax.sgd(1.0), **how)
        return rounds.sync(x, rounds.init(jnp.ones(200)), weight=weight)[0]

    def of_two(run, check_vma):
        mesh = jax.make_mesh((2,), ("a",), (AxisType.Auto,), devices=jax.devices()[:2])
        spec = PartitionSpec("a")
        return jax.shard_map(
            of_one(run), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma
        )

    def over(axes, check_vma=False):
        run = jax.vmap(functools.partial(sync, axes), axis_name="b")
        return jax.vmap(run, axis_name="a") if inside == "vmap" else of_two(run, check_vma)

    alone = jax.jit(jax.vmap(functools.partial(sync, "all"), axis_name="all"))
    weight = jnp.arange(1.0, 7).reshape(2, 3)
    for axes in (("a", "b"), ("b", "a")):
        actual = jax.jit(over(axes))(x, weight).reshape(6, 200)
        rows = (y if axes == ("a", "b") else jnp.swapaxes(y, 0, 1) for y in (x, weight))
        expected = alone(*(y.reshape(6, *y.shape[2:]) for y in rows))
        assert_workers_bitwise_equal(actual)
        np.testing.assert_allclose(actual[0], expected[0], rtol=1e-6, atol=1e-6)
    if inside == "shard_map":
        with pytest.raises(ValueError, match=r"\['b'\] are of jax.vmap and \['a'\] of .*check_vma"):
            over(("a", "b"), check_vma=True)(x, weight)


@pytest.mark.parametrize("name", COMPRESSORS)
def test_parameters_that_jax_knows_to_be_the_same_on_all_workers_stay(name):
    rounds = local_opt.local_rounds(SGD, compress=COMPRESSORS[name])
    sync = jax.vmap(lambda x, _: rounds.sync(x, rounds.init(x))[0], (None, 0), axis_name="worker")
    x = ANCHOR["b"]
    np.testing.assert_array_equal(jax.jit(sync)(x, jnp.arange(3)), np.stack([x] * 3))


def test_sparseloco_equals_its_pseudocode():
    """70 blocks, of which 64 share one table and 6 the other; two bits, places and feedback."""
    size, rate, compressor = 69 * 4096 + 7, 0.1, COMPRESSORS["top_k_2bit"]
    first = RNG.normal(size=size).astype(np.float32)
    plan = local_opt.SyncPlan([0, 2], 3)  # the second round sends what the first has lost
    grads = np.float32(RNG.normal(size=(plan.total_steps, W, size)) ** 3)
    opt = local_opt.local_steps(optax.sgd(rate), plan, outer=optax.sgd(0.65), compress=compressor)

    def one(x, grads):
        def body(carry, grads):
            updates, state = opt.update(grads, carry[1], carry[0])
            x = optax.apply_updates(carry[0], updates)
            return (x, state), x

        return jax.lax.scan(body, (x, opt.init(x)), grads)[1]

    result = np.asarray(jax.jit(vmap(one))(copies(first), np.swapaxes(grads, 0, 1)))
    anchor, lost = np.asarray(first, np.float64), np.zeros((W, size))
    rounded = reference.ROUNDED["top_k_2bit"]
    assert compressor.feedback == 0.95
    for start, length in zip(plan.starts, plan.periods, strict=True):
        changes = -rate * grads[start : start + length].astype(np.float64).sum(axis=0)
        mean, lost = reference.synchronize_changes(anchor, changes, lost, compressor, rounded)
        anchor = anchor + 0.65 * (mean - anchor)
        far = (np.abs(result[:, start + length - 1] - anchor) > 1e-5).sum(axis=1)
        assert far.max() <= 1e-4 * size, far  # ties of two codes
    assert np.abs(lost).max() > 1e-3
