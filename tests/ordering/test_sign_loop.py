"""The Pallas kernels of the signs equal the scan, which `test_kernel.py` compares with NumPy."""

import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding

import ordering
from benchmarks.topologies import CUDA, LIBTPU, slice_of, uncached
from ordering import signs as sign_kernel
from ordering.signs import Greedy
from syncopate import mesh
from tests import tables
from tests.compiled_runs import compiled_by, marks_of, text_of

RULES = {
    "greedy": Greedy(),
    "walk": ordering.baselines.self_balancing_walk(bound=40.0),
    "halving": ordering.baselines.kernel_halving(num_epochs=7, num_pairs=30),
}
LOOPS = {
    "scan": sign_kernel.signs_by_scan,
    "kernel": functools.partial(sign_kernel.signs_in_kernel, interpret=True),
    "kernel of Triton": functools.partial(sign_kernel.signs_in_kernel, interpret=True, triton=True),
}


def products(size, seed):
    """Of whole numbers, with ties; some vectors are not valid or not finite."""
    vectors, rng = tables.whole_numbers((size, 3), seed, high=3), np.random.default_rng(seed)
    gram = vectors @ vectors.T
    dots = gram[:, 0] - 1
    dots[rng.random(size) < 0.1] = np.nan
    return [jnp.asarray(x, jnp.float32) for x in (dots, gram)], jnp.asarray(rng.random(size) < 0.9)


@functools.cache
def compiled(loop, rule):
    run = functools.partial(LOOPS[loop], RULES[rule])
    return jax.jit(run), jax.jit(jax.vmap(run, in_axes=(None, 0, 0, 0)))


def plain(state):
    """Numbers of a rule's state."""
    return [np.asarray(x) for x in jax.tree.leaves(state) if not mesh.is_key(x)]


@pytest.mark.parametrize("rule", RULES)
@given(size=st.sampled_from([7, 64]), seed=st.integers(0, 99))
def test_the_kernel_equals_the_scan(rule, size, seed):
    (dots, gram), valid = products(size, seed)
    state = RULES[rule].init(jax.random.key(seed))
    for _ in range(2):  # the state goes on
        results = [compiled(loop, rule)[0](state, dots, gram, valid) for loop in LOOPS]
        states, signs = zip(*results, strict=True)
        for numbers in zip(*map(plain, states), strict=True):
            for other in numbers[1:]:
                np.testing.assert_array_equal(numbers[0], other)
        for other in signs[1:]:
            np.testing.assert_array_equal(signs[0], other)
        taken = np.asarray(valid) & np.isfinite(np.asarray(dots))
        assert not np.asarray(signs[0])[~taken].any() and np.abs(signs[0])[taken].all()
        state = states[1]


@pytest.mark.parametrize("loop", ["kernel", "kernel of Triton"])
@pytest.mark.parametrize("rule", RULES)
def test_workers_on_one_device_are_a_batch(rule, loop):
    rows = [products(5, seed) for seed in range(3)]
    dots, gram, valid = (jnp.stack(x) for x in zip(*[(*a, v) for a, v in rows], strict=True))
    state = RULES[rule].init(jax.random.key(0))
    states, signs = compiled(loop, rule)[1](state, dots, gram, valid)
    for i, ((one_dots, one_gram), one_valid) in enumerate(rows):
        one, expected = compiled("scan", rule)[0](state, one_dots, one_gram, one_valid)
        np.testing.assert_array_equal(signs[i], expected)
        for batch, single in zip(plain(states), plain(one), strict=True):
            np.testing.assert_array_equal(batch[i], single)


def test_a_rule_with_arrays_in_its_state_is_signed_by_the_scan(monkeypatch):
    called = []
    for name in ("signs_by_scan", "signs_in_kernel"):
        loop = functools.partial(
            lambda name, *args, **options: called.append((name, options)), name
        )
        monkeypatch.setattr(sign_kernel, name, loop)
    args = jnp.zeros(2), jnp.zeros((2, 2)), jnp.ones(2, bool)
    for platform in ("cpu", "gpu", "tpu"):
        monkeypatch.setattr(sign_kernel.mesh, "platform", lambda platform=platform: platform)
        for rule, state in (
            (RULES["walk"], RULES["walk"].init(jax.random.key(0))),
            (Greedy(), jnp.zeros(4)),
        ):
            jax.eval_shape(functools.partial(sign_kernel.signs_of, rule), state, *args)
    scan, kernel = ("signs_by_scan", {}), "signs_in_kernel"
    kernels = [[(kernel, {"triton": triton}), scan, scan] for triton in (True, False)]
    assert called == [scan, scan, *kernels[0], *kernels[1]], "a scan beside each kernel"


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
@pytest.mark.parametrize("jit", [jax.jit, lambda function: function])
def test_arrays_on_the_cpu_of_another_machine_are_signed_there(platform, jit, monkeypatch):
    """An accelerator is the default, and the arrays are not on it."""
    random = np.random.default_rng(0)
    vectors = jnp.asarray(random.normal(size=(6, 4)), jnp.float32)
    args = jnp.zeros(()), vectors @ jnp.ones(4), vectors @ vectors.T, jnp.ones(6, bool)
    expected = sign_kernel.signs_by_scan(Greedy(), *args)[1]
    monkeypatch.setattr(sign_kernel.mesh, "platform", lambda: platform)
    monkeypatch.setattr(sign_kernel, "_has_triton", lambda: True)
    actual = jit(lambda *args: sign_kernel.signs_of(Greedy(), *args)[1])(*args)
    np.testing.assert_array_equal(actual, expected)


def test_jax_default_device_decides_on_a_machine_with_a_gpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert mesh.platform() == "gpu"
    for device in ("cpu", jax.devices("cpu")[0]):
        with jax.default_device(device):
            assert mesh.platform() == "cpu"


@pytest.mark.parametrize("capability,fits", [("7.5", False), ("8.0", True), ("10.0", True)])
def test_a_gpu_without_triton_takes_the_scan(capability, fits, monkeypatch):
    gpu = types.SimpleNamespace(compute_capability=capability)
    monkeypatch.setattr(jax, "local_devices", lambda backend: [gpu])
    assert sign_kernel._has_triton() == fits


def lowered(chip, loop, *args):
    of_chip, _ = slice_of(f"{chip}:1", 1)
    place = functools.partial(jax.ShapeDtypeStruct, sharding=NamedSharding(of_chip, jax.P()))
    with jax.set_mesh(of_chip):
        return jax.jit(loop).lower(*jax.tree.map(lambda x: place(x.shape, x.dtype), args))


def shapes(rule, size):
    state = jax.eval_shape(rule.init, jax.random.key(0))
    return state, jnp.zeros(size), jnp.zeros((size, size)), jnp.zeros(size, bool)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "chip,size",
    [
        *(pytest.param(chip, 64, marks=marks_of(LIBTPU)) for chip in ("v5e", "v6e")),
        *(pytest.param("h100", size, marks=marks_of(CUDA)) for size in (1, 24, 64, 1024)),
    ],
)
def test_compiled_for_an_accelerator_the_loop_is_one_kernel(chip, size, rule):
    loop, args = functools.partial(sign_kernel.signs_of, RULES[rule]), shapes(RULES[rule], size)
    text = text_of(lowered(chip, loop, *args), chip)
    kernels = re.findall(r'custom_call_target="(.*?)"', text)
    assert kernels == ["__gpu$xla.gpu.triton" if chip == "h100" else "tpu_custom_call"]
    assert " while(" not in text


@compiled_by(CUDA)
def test_workers_on_one_gpu_are_one_kernel():
    rule = RULES["halving"]
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct((8, *x.shape), x.dtype), shapes(rule, 24))
    text = text_of(
        lowered("h100", jax.vmap(functools.partial(sign_kernel.signs_of, rule)), *args), "h100"
    )
    assert text.count('custom_call_target="__gpu$xla.gpu.triton"') == 1


@compiled_by(LIBTPU)
def test_the_compiler_counts_the_kernel_as_the_scan():
    """The compiler counts one iteration of a loop, which makes `UNROLL` signs."""
    size, flops = 64, []
    for loop in (sign_kernel.signs_by_scan, sign_kernel.signs_in_kernel):
        args = shapes(RULES["greedy"], size)
        with uncached():
            program = lowered("v5e", functools.partial(loop, RULES["greedy"]), *args).compile()
        flops.append(program.cost_analysis()["flops"])
    turn, kernel = flops
    assert kernel == pytest.approx(turn * size / sign_kernel.UNROLL, rel=0.2)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("manual", [{"worker"}, {"worker", "model"}])
def test_a_kernel_is_lowered_under_axes_that_are_left_to_the_compiler(
    manual, check_vma, monkeypatch
):
    """Every device runs it whole; the compiler does not split kernels."""
    monkeypatch.setattr(sign_kernel.mesh, "platform", lambda: "tpu")
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    grid = jax.sharding.Mesh(devices, ("worker", "model"))

    def signs(dots, gram):
        valid = jnp.ones(dots.shape, bool)
        return sign_kernel.signs_of(Greedy(), (), dots, gram, valid)[1]

    split = jax.P("worker")
    run = jax.shard_map(
        lambda dots, gram: signs(dots[0], gram[0])[None],
        mesh=grid,
        in_specs=split,
        out_specs=split,
        axis_names=manual,
        check_vma=check_vma,
    )
    traced = jax.jit(run).trace(jnp.ones((2, 8)), jnp.ones((2, 8, 8)))
    assert "tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text()
