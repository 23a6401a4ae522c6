"""Rows of the tables of gradients, and the verdict on each.

A row is a loss (params, batch, key) -> losses [n] with arguments. What it should give is computed
for one example after another, without vmap: `jax.value_and_grad` of each example's loss, and
`jax.grad` of their mean. Functions of ours must agree with it in losses, mean gradient, rows and
types, and sketches with the map of their plan applied to these rows; or refuse by name.
"""

import functools
import importlib
import sys
import traceback
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import ordering
from tests.sketched import SKETCH_KEY, sketch_of

B = 4  # a power of two: the parts of a mean are exact
KEY = jax.random.key(11)
TABLES = ("operations", "indexing", "losses", "linen", "nnx", "equinox_nn", "haiku_modules")
PACKAGES = ("ordering", "syncopate")


class Row(NamedTuple):
    loss: Callable
    params: Any
    batch: Any  # leaves [B, ...]
    refused: str = ""  # a word of the message, where the row is to be refused
    tolerance: float = 2e-4  # of the largest number of a leaf, in float32
    modes: tuple[str, ...] | None = None  # None: all of the table
    others: tuple["Row", ...] = ()  # in place of this row, where its results are not finite


class Verdict(NamedTuple):
    kind: str  # right, refused, wrong, raw; "theirs": JAX itself cannot take the gradient
    why: str = ""


def score(y, n=None):
    """One number, or n, of any results: what is real and floating is weighed."""
    leaves = [leaf for leaf in jax.tree.leaves(y) if hasattr(leaf, "dtype")]
    leaves = [
        part
        for leaf in leaves
        for part in ((leaf.real, leaf.imag) if jnp.iscomplexobj(leaf) else (leaf,))
        if jnp.issubdtype(part.dtype, jnp.floating)
    ]
    total = 0.0
    for leaf in leaves:
        flat = leaf.astype(jnp.float32).reshape(*(() if n is None else (n,)), -1)
        weights = 1 + jnp.cos(jnp.arange(flat.shape[-1], dtype=jnp.float32))
        total = total + jnp.sum(flat * weights + 0.3 * jnp.square(flat), axis=-1)
    return total


def each(of_one: Callable) -> Callable:
    """The loss of (params, example): one example after another, as the caller's n says."""

    def loss(params, batch, key):
        count = len(jax.tree.leaves(batch)[0])
        examples = [jax.tree.map(lambda x: x[i], batch) for i in range(count)]  # noqa: B023
        return jnp.stack([of_one(params, x) for x in examples])

    return loss


# Other forms of a row ------------------------------------------------------------------------
def _vmap(row):
    def loss(params, batch, key):
        keys = jax.random.split(key, len(jax.tree.leaves(batch)[0]))

        def one(x, key):
            return row.loss(params, jax.tree.map(lambda x: x[None], x), key)[0]

        return jax.vmap(one)(batch, keys)

    return row._replace(loss=loss)


def _remat(row):
    return row._replace(loss=jax.checkpoint(row.loss))


def _cond(row):
    def loss(params, batch, key):
        first = jnp.ravel(jax.tree.leaves(batch)[0])[0].astype(jnp.float32)
        return jax.lax.cond(
            jnp.sin(9 * first) > 0,
            lambda p: row.loss(p, batch, key),
            lambda p: 2 * row.loss(p, batch, key),
            params,
        )

    return row._replace(loss=loss)


def _scan(row):
    """The parameters are constants of a loop over data."""

    def loss(params, batch, key):
        twice = jax.tree.map(lambda x: jnp.stack([x, x[..., ::-1] if x.ndim > 1 else x]), batch)
        count = len(jax.tree.leaves(batch)[0])

        def body(total, x):
            return total + row.loss(params, x, key).astype(jnp.float32), None

        return jax.lax.scan(body, jnp.zeros(count), twice)[0]

    return row._replace(loss=loss)


def _stacked(row):
    """A loop over parameters that are stacked, rematerialised as layers are."""

    def loss(params, batch, key):
        count = len(jax.tree.leaves(batch)[0])

        @jax.checkpoint
        def body(total, carried):
            return total + row.loss(carried, batch, key).astype(jnp.float32), None

        return jax.lax.scan(body, jnp.zeros(count), params)[0]

    two = jax.tree.map(lambda p: jnp.stack([p, (0.9 * p).astype(p.dtype)]), row.params)
    return row._replace(loss=loss, params=two)


def _floating(tree, dtype):
    return jax.tree.map(
        lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )


def _bfloat16(row):
    """Parameters and data."""
    params, batch = (_floating(tree, jnp.bfloat16) for tree in (row.params, row.batch))
    return row._replace(params=params, batch=batch)


def _mixed(row):
    """Parameters of bfloat16, data of float32."""
    return row._replace(params=_floating(row.params, jnp.bfloat16))


MODES = {
    "plain": lambda row: row,
    "vmap": _vmap,
    "remat": _remat,
    "cond": _cond,
    "scan": _scan,
    "stacked": _stacked,
    "bfloat16": _bfloat16,
    "mixed": _mixed,
}


# The verdict -----------------------------------------------------------------------------------
def reference(row: Row):
    """(losses, mean gradient, rows), one example after another."""

    def part(params, unit):
        example, key = unit
        alone = jax.tree.map(lambda x: x[None], example)
        return jnp.reshape(row.loss(params, alone, key), ()) / B

    def run(params, batch):
        units = batch, jax.random.split(KEY, B)
        of_part = jax.value_and_grad(part)
        losses, rows = jax.lax.map(lambda unit: of_part(params, unit), units)
        whole = lambda p: jnp.sum(jax.lax.map(lambda unit: part(p, unit), units))  # noqa: E731
        times = lambda x: x * jnp.asarray(B, x.dtype)  # noqa: E731
        return times(losses), jax.grad(whole)(params), jax.tree.map(times, rows)

    return run


def sizes_of(params) -> dict[str, int]:
    """Sizes of sketches for which gradients are kept, formed, and the largest never formed."""
    leaves = [leaf.size for leaf in jax.tree.leaves(params)]
    whole = max(1, sum(leaves))
    return {"kept": whole, "formed": max(1, whole - 1), "sketched": max(1, max(leaves) // 6)}


def _functions(row, names):
    each = {"per_example_grads": ordering.per_example_grads(row.loss)}
    each["in turn"] = ordering.per_example_grads(row.loss, in_turn=True)
    for name, size in sizes_of(row.params).items():
        each[name] = ordering.sketched_grads(row.loss, SKETCH_KEY, size=size)
    return {name: each[name] for name in names}


ALL = ("per_example_grads", "in turn", "kept", "formed", "sketched")
FEW = ("per_example_grads", "formed", "sketched")


def verdict(row: Row, names: Iterable[str] = FEW) -> Verdict:
    with (
        warnings.catch_warnings(),
        jax.numpy_rank_promotion("allow"),
    ):
        warnings.simplefilter("ignore")
        result = _verdict(row, tuple(names))
        for other in row.others:
            if result.why != "not finite":
                break
            result = _verdict(other, tuple(names))
        return result


def _verdict(row, names) -> Verdict:
    sizes, errors = sizes_of(row.params), {}

    def run(params, batch, names=names):
        results = {"expected": reference(row)(params, batch)}
        for name, gradients in _functions(row, names).items():
            try:
                results[name] = gradients(params, batch, key=jax.random.clone(KEY))
                if name in ("formed", "sketched") and sizes[name] < sizes["kept"]:
                    to_sketch = sketch_of(params, SKETCH_KEY, size=sizes[name])
                    results[name + " of rows"] = jax.vmap(to_sketch)(results["expected"][2])
            except Exception as error:
                errors[name] = error
        return results

    try:
        result = jax.device_get(jax.jit(run)(row.params, row.batch))
    except Exception as error:
        try:
            jax.device_get(jax.jit(functools.partial(run, names=()))(row.params, row.batch))
        except Exception as theirs:
            return Verdict("theirs", _line(theirs))
        return Verdict("raw", "compiled: " + _line(error))
    if errors:
        return _judge(row, errors, names)
    if row.refused:
        return Verdict("wrong", "not refused")
    return _compare(row, result, names)


def _line(error):
    text = str(error).strip().split("\n")[0][:160]
    return f"{type(error).__name__}: {text}"


def _judge(row, errors, names):
    name, error = next(iter(errors.items()))
    frame = traceback.extract_tb(error.__traceback__)[-1]
    ours = any(f"/{package}/" in frame.filename for package in PACKAGES)
    by_name = type(error) is ValueError and ours and (frame.line or "").startswith("raise")
    if by_name and row.refused and row.refused in str(error):
        return Verdict("refused")
    where = f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}"
    return Verdict("wrong" if by_name else "raw", f"{name}: {_line(error)} ({where})")


def _compare(row, actual, names):
    losses, mean, rows = actual["expected"]
    if not all(np.all(np.isfinite(np.float32(x))) for x in jax.tree.leaves((mean, rows))):
        return Verdict("theirs", "not finite")
    for name in names:
        computed_losses, computed_mean, computed_rows = actual[name]
        expected = {"losses": (computed_losses, np.float32(losses)), "mean": (computed_mean, mean)}
        if name in ("per_example_grads", "in turn"):
            expected["rows"] = (computed_rows, rows)
        elif name + " of rows" in actual:
            expected["sketches"] = (computed_rows, actual[name + " of rows"])
        else:
            flat = [np.float32(x).reshape(B, -1) for x in jax.tree.leaves(rows)]
            flat = np.concatenate(flat, axis=1)
            if computed_rows.shape[1] > flat.shape[1]:
                return Verdict("wrong", f"{name}: sketches have the shape {computed_rows.shape}")
            expected["sketches"] = (computed_rows, flat)
        for what, (ours, theirs) in expected.items():
            if why := differs(ours, theirs, row.tolerance, params=row.params):
                return Verdict("wrong", f"{name}: {what} {why}")
    of_batch = jax.random.key(0)
    size = sizes_of(row.params)["sketched"]
    leaves = ordering.sketch_plan(row.loss, row.params, row.batch, key=of_batch, size=size)
    return Verdict("right", " ".join(leaf.how for leaf in leaves))


def differs(ours, theirs, tolerance, params=None) -> str:
    """In what two trees differ, or nothing."""
    if jax.tree.structure(ours) != jax.tree.structure(theirs):
        return "have another structure"
    coarse = any(jnp.finfo(p.dtype).bits < 32 for p in jax.tree.leaves(params))
    pairs = list(zip(*map(jax.tree.leaves, (ours, theirs)), strict=True))
    overall = max(
        [float(np.max(np.abs(np.nan_to_num(np.float32(b))), initial=0)) for _, b in pairs] + [0]
    )
    for a, b in pairs:
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return f"{a.dtype}{list(a.shape)}, not {b.dtype}{list(b.shape)}"
        a, b = np.float32(a), np.float32(b)
        largest = max(np.max(np.abs(np.nan_to_num(b)), initial=0), 1e-2 * overall)
        limit = max(4e-2 if coarse else 0, tolerance) * largest + 1e-30
        off = np.abs(a - b)
        if not np.array_equal(np.isnan(a), np.isnan(b)):
            return "are NaN elsewhere"
        if np.nanmax(np.where(a == b, 0, off), initial=0) > limit:
            return f"{np.nanmax(off):.3g} off, the largest is {largest:.3g}"
    return ""


# Tables ----------------------------------------------------------------------------------------
LOW = (
    "bfloat16",
    "Fp8",
    "precision",
    "convert_element_type",
    "astype",
    "float32 products",
)  # in names of rows


def rows_of(name: str, only: Iterable[str] = ()) -> dict[str, Row]:
    """The rows of a table: all of them, or those of these names."""
    module = importlib.import_module(f"tests.conformance.{name}")
    if hasattr(module, "rows"):
        result = module.rows(only)
    else:
        result, there = {}, module.names()
        for layer, cases in module.CASES.items():
            for variant, case in cases.items():
                label = f"{layer} {variant}".strip()
                if layer in there and (not only or label in only):
                    rng = np.random.default_rng(zlib.crc32(label.encode()))
                    result[label] = module.row_of(case, rng)
    return {
        label: row._replace(tolerance=4e-2) if any(word in label for word in LOW) else row
        for label, row in result.items()
    }


def unknown(name: str) -> list[str]:
    """What the library has, and the table neither has nor leaves out with a reason."""
    module = importlib.import_module(f"tests.conformance.{name}")
    if hasattr(module, "unknown"):
        return module.unknown()
    return [n for n in module.names() if n not in module.CASES and n not in module.LEFT_OUT]


class Table(NamedTuple):
    """What was found, {(row, mode): verdict}."""

    name: str
    results: dict

    def count(self, kind: str) -> int:
        return Counter(v.kind for v in self.results.values())[kind]

    def faults(self) -> dict:
        return {at: v for at, v in self.results.items() if v.kind in ("wrong", "raw")}

    def __str__(self):
        theirs, ways = self.count("theirs"), Counter()
        for v in self.results.values():
            ways.update(v.why.split() if v.kind == "right" else ())
        return "\n".join(
            [
                f"{self.name}: {len(self.results) - theirs} tried, {self.count('right')} right, "
                f"{self.count('refused')} refused, {self.count('raw')} raw, "
                f"{self.count('wrong')} wrong; {theirs} that JAX does not differentiate either "
                f"(parameters of right rows: {', '.join(f'{n} {w}' for w, n in ways.items())})",
                *(f"  {v.kind} {row} [{mode}] {v.why}" for (row, mode), v in self.faults().items()),
            ]
        )


def in_mode(row: Row, mode: str) -> Verdict:
    try:
        form, *others = (MODES[mode](each) for each in (row, *row.others))
    except Exception as error:
        return Verdict("theirs", _line(error))
    return verdict(form._replace(others=tuple(others)), ALL if mode == "plain" else FEW)


def table(name: str, only: Iterable[str] = (), report: Callable = lambda *result: None) -> Table:
    """Every row in every mode; programs are forgotten as it goes, or memory would be short."""
    results = {}
    for count, (label, row) in enumerate(rows_of(name, only).items()):
        for mode in MODES if row.modes is None else row.modes:
            results[label, mode] = in_mode(row, mode)
            report(label, mode, results[label, mode])
        if count % 32 == 31:
            jax.clear_caches()
    return Table(name, results)


def main(argv):
    def report(label, mode, result):
        if result.kind not in ("right", "refused"):
            print(f"{result.kind:8} {label} [{mode}] {result.why}", flush=True)

    only = [a for a in argv if a not in TABLES]
    for name in [a for a in argv if a in TABLES] or TABLES:
        print(str(table(name, only, report)).split("\n")[0], flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
