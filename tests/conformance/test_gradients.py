"""Gradients of what others wrote: some rows of every table in every run, all in a slow one.

pytest -m slow -n 0 -s tests/conformance/test_gradients.py     prints the counts
"""

import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ordering
from tests.cases import mostly_slow
from tests.conformance.gradients import (
    KEY,
    TABLES,
    differs,
    in_mode,
    reference,
    rows_of,
    sizes_of,
    table,
    unknown,
)
from tests.sketched import SKETCH_KEY

# Modules that others have, without which a table is left out.
NEEDS = {"haiku_modules": ("haiku", "dm-haiku")}
FEW = [
    ("operations", "lax.scan", "mixed"),
    ("operations", "lax.dot_general float32", "bfloat16"),
    ("operations", "lax.ragged_dot", "plain"),
    ("operations", "lax.cond of operands", "plain"),
    ("indexing", "gather fill 7.0, beyond", "plain"),
    ("indexing", "at.get fill None, beyond", "remat"),
    ("losses", "sparsemax_loss", "bfloat16"),
    ("linen", "Dense in nn.scan and nn.remat", "mixed"),
    ("nnx", "Conv groups", "stacked"),
    ("equinox_nn", "Shared", "scan"),
    ("haiku_modules", "Linear layer_stack", "mixed"),
]


def needed(name):
    for module, distribution in [NEEDS[name]] if name in NEEDS else []:
        pytest.importorskip(module, reason=f"needs {distribution}: pip install {distribution}")


@pytest.mark.parametrize("name,row,mode", FEW)
def test_a_few(name, row, mode):
    needed(name)
    result = in_mode(rows_of(name, [row])[row], mode)
    assert result.kind in ("right", "refused"), result


@pytest.mark.slow  # not in every run, where another library's new version would end all
@pytest.mark.parametrize("name", [name for name in TABLES if name != "indexing"])
def test_everything_has_a_row_or_a_reason(name):
    """What a library adds tomorrow is missing here, until it has one."""
    needed(name)
    assert not unknown(name)


ALONE = [
    ("linen", "Conv strided"),
    ("linen", "Embed"),
    ("equinox_nn", "LSTMCell"),
    ("losses", "ctc_loss"),
    ("operations", "lax.dot_general bfloat16 to float32"),
]


@pytest.mark.parametrize("name,label", mostly_slow(ALONE, quick=[("linen", "Embed")]))
def test_microbatches_and_groups(name, label):
    """One unit for a batch, and one for each of its two groups."""
    row = rows_of(name, [label])[label]
    mean = lambda p, batch, key: jnp.mean(row.loss(p, batch, key))  # noqa: E731
    pairs = jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), row.batch)

    @jax.jit
    def run(params, batch, pairs):
        clone = functools.partial(jax.random.clone, KEY)
        of_batch = ordering.microbatch_grads(row.loss)(params, batch, key=clone())
        expected = jax.value_and_grad(mean)(params, batch, KEY)
        of_groups = ordering.per_example_grads(ordering.group_loss(row.loss))(
            params, pairs, key=clone()
        )
        each = [
            jax.value_and_grad(mean)(params, jax.tree.map(lambda x: x[i], pairs), KEY)  # noqa: B023
            for i in range(2)
        ]
        return of_batch, expected, of_groups, jax.tree.map(lambda *x: jnp.stack(x), *each)

    with warnings.catch_warnings(), jax.numpy_rank_promotion("allow"):
        warnings.simplefilter("ignore")
        (losses, mean, rows), expected, of_groups, each = run(row.params, row.batch, pairs)
    for ours, theirs in (
        ((losses[0], mean), expected),
        ((losses[0], jax.tree.map(lambda g: g[0], rows)), expected),
        ((of_groups[0], of_groups[2]), each),
    ):
        assert not differs(ours, theirs, row.tolerance, row.params)


PRODUCTS = [
    ("linen", "Dense of a sequence"),
    ("linen", "Conv groups"),
    ("linen", "Embed"),
    ("nnx", "LoRALinear"),
    ("equinox_nn", "Conv2d dilated"),
    ("equinox_nn", "Shared"),
    ("operations", "lax.scan of a parameter"),
    ("operations", "jnp.einsum of three"),
    ("operations", "jnp.sin f(w) x"),
    ("indexing", "tied after, inside"),
    ("indexing", "at.get fill 7.0, beyond"),
]


def assert_products_are_kept(name, label, sketches=512):
    """E[s_i . s_j] = g_i . g_j over keys, whatever map the plan has."""
    row = rows_of(name, [label])[label]
    size = sizes_of(row.params)["sketched"]

    @jax.jit
    def run(params, batch, keys):
        def products(key):
            rows = ordering.sketched_grads(row.loss, key, size=size)(params, batch, key=KEY)[2]
            return jnp.matmul(rows, rows.T, precision="highest")

        result = jax.lax.map(products, keys, batch_size=64)
        return result.mean(0), result.std(0) / sketches**0.5, reference(row)(params, batch)[2]

    with warnings.catch_warnings(), jax.numpy_rank_promotion("allow"):
        warnings.simplefilter("ignore")
        actual, error, rows = run(row.params, row.batch, jax.random.split(SKETCH_KEY, sketches))
    flat = np.concatenate(
        [np.float32(g).reshape(len(actual), -1) for g in jax.tree.leaves(rows)], 1
    )
    expected = flat @ flat.T
    limit = 5 * error + 1e-3 * np.max(np.abs(expected))
    assert np.all(np.abs(actual - expected) <= limit), (actual, expected, error)


@pytest.mark.parametrize("name,label", PRODUCTS[2:3])
def test_products_of_sketches(name, label):
    assert_products_are_kept(name, label)


@pytest.mark.slow
@pytest.mark.parametrize("name,label", PRODUCTS)
def test_products_of_all_sketches(name, label):
    assert_products_are_kept(name, label)


PRECISE = [
    ("operations", "lax.dot_general highest"),
    ("operations", "jnp.einsum highest"),
    ("operations", "lax.conv_general_dilated highest"),
    ("linen", "Dense highest"),
    ("linen", "Conv highest"),
    ("linen", "MultiHeadDotProductAttention highest"),
    ("nnx", "Linear highest"),
    ("haiku_modules", "Linear highest"),
]


@pytest.mark.parametrize("name,label", mostly_slow(PRECISE, quick=PRECISE[:3]))
def test_precision_is_kept(name, label):
    """Of no product fewer than in JAX's own backward pass are computed in full precision."""
    needed(name)
    row = rows_of(name, [label])[label]

    def precise(function):
        one = jax.tree.map(lambda x: x[:1], row.batch)
        program = str(jax.make_jaxpr(function)(row.params, one))
        return len(re.findall(r"precision=\(?(?:Precision\.)?HIGHEST", program))

    with warnings.catch_warnings(), jax.numpy_rank_promotion("allow"):
        warnings.simplefilter("ignore")
        mean = lambda p, batch: jnp.mean(row.loss(p, batch, KEY))  # noqa: E731
        wanted = precise(jax.grad(mean))
        assert wanted >= 2
        for size in sizes_of(row.params).values():
            gradients = ordering.sketched_grads(row.loss, SKETCH_KEY, size=size)
            actual = precise(lambda p, batch: gradients(p, batch, key=KEY)[1])  # noqa: B023
            assert actual >= wanted, (size, actual, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
def test_all(name):
    needed(name)
    result = table(name)
    print(f"\n{result}")
    assert not result.faults(), result
    # Of functions that are called by themselves some have no gradient; a row by hand has one.
    by_hand = {at: v for at, v in result.results.items() if " f(" not in at[0] and at[1] == "plain"}
    theirs = {at: v.why for at, v in by_hand.items() if v.kind == "theirs"}
    assert set(theirs.values()) <= {"not finite"}, theirs
