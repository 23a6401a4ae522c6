"""Batches arrive on the device with the values that they had, or are refused by name."""

import contextvars

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import ordering
from ordering import blocks, echo
from ordering.data import LoadError, as_source, prefetch_to_device, read_epochs
from ordering.data.loader import check_steps, on_device

BIG = np.array([2**31 + 1, 2**40 + 9, 2**32 + 7])
PLACE = jax.sharding.SingleDeviceSharding(jax.devices()[0])


def arrived(batch):
    """What a step gets of a batch."""
    with prefetch_to_device([batch]) as loader:
        return next(loader)


def by_epochs(source):
    order = ordering.baselines.shuffle_once(len(source))
    return read_epochs({"id": source}, order, jax.random.key(0), num_epochs=1)


def by_blocks(source):
    order, data = (
        ordering.baselines.shuffle_once(len(source)),
        blocks.split({"id": source}, unit_size=1),
    )
    return blocks.read_blocks(data, order, jax.random.key(0), batch_size=1, num_epochs=1)


def by_echo(source):
    return echo.repeat([{"id": source}], echo.fixed(1, total_steps=1))


def by_load_ahead(source):
    return prefetch_to_device([{"id": source}])


@pytest.mark.parametrize("read", [by_epochs, by_blocks, by_echo, by_load_ahead])
@pytest.mark.parametrize("source", [BIG, BIG.astype(np.uint64), np.array([1e39, 0.0, -1e300])])
def test_no_reader_changes_a_value(read, source):
    with pytest.raises(
        LoadError, match=r"\['id'\] has .*, which .*32 cannot hold: .*JAX_ENABLE_X64=1"
    ):
        list(read(source))


@pytest.mark.parametrize(
    "fits, beyond, wanted",
    [
        (np.int64([-(2**31), 2**31 - 1]), np.int64([0, 2**31]), np.int32),
        (np.int64([0]), np.int64([-(2**31) - 1]), np.int32),
        (np.uint64([0, 2**32 - 1]), np.uint64([2**32]), np.uint32),
        (np.float64([np.inf, np.nan, -3.4e38, 1e-50]), np.float64([3.5e38]), np.float32),
        (np.complex128([1j * np.inf, 3e38]), np.complex128([1e39j]), np.complex64),
        (np.array(7, np.int64), np.array(2**31, np.int64), np.int32),
    ],
)
def test_what_fits_is_cast_and_what_does_not_is_named(fits, beyond, wanted):
    value = arrived({"a": [fits]})["a"][0]
    assert value.dtype == wanted
    np.testing.assert_array_equal(value, fits.astype(wanted))
    with pytest.raises(LoadError, match=r"batch\['a'\]\[0\] has .*, which .* cannot hold"):
        arrived({"a": [beyond]})


def test_with_x64_values_stay_as_they_are():
    """On the loader's thread, too, which reads the setting of all threads."""
    old = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    try:
        for array in (BIG, np.array([1e300])):
            value = arrived(array)
            assert value.dtype == array.dtype
            np.testing.assert_array_equal(value, array)
    finally:
        jax.config.update("jax_enable_x64", old)


def test_types_of_32_bits_and_fewer_arrive_as_they_are():
    arrays = [
        np.arange(3).astype(kind)
        for kind in (
            np.uint32,
            np.int8,
            np.uint16,
            np.bool_,
            np.float16,
            ml_dtypes.bfloat16,
            ml_dtypes.int4,
            ml_dtypes.float8_e5m2,
        )
    ]
    arrays.append(np.array([2**32 - 1], np.uint32))
    for value, array in zip(arrived(arrays), arrays, strict=True):
        assert value.dtype == array.dtype
        np.testing.assert_array_equal(np.asarray(value), array)
    array = jnp.arange(3)
    assert arrived([array])[0] is array


@pytest.mark.parametrize("places", [None, {"x": PLACE, "y": None, "mask": None}])
def test_nothing_is_written_out_on_the_way_to_a_step(places, monkeypatch):
    """JAX's error about a None in a tree holds all arrays, copied from the device for it."""
    seen = []
    written = lambda array: seen.append(array.shape) or "an array"  # noqa: E731
    batch = {"x": np.zeros((64, 8)), "y": np.zeros(64), "mask": None}
    arrays = arrived(batch)
    monkeypatch.setattr(type(arrays["x"]), "__repr__", written)
    with np.printoptions(override_repr=written):
        for each in (batch, arrays):
            on_device(each, places)
        for _ in echo.repeat([batch, arrays], echo.fixed(2, total_steps=4)):
            pass
    assert seen == []


def test_other_byte_orders_are_turned():
    for kind in (">i4", ">u2", ">f4", ">i8", ">f8"):
        array = np.array([1, 2, 300]).astype(kind)
        value = arrived(array)
        assert value.dtype.isnative and value.tolist() == [1, 2, 300]
    with pytest.raises(LoadError, match="2147483648.* int32"):
        arrived(np.array([2**31]).astype(">i8"))


def test_numbers_of_python_keep_their_weak_types():
    count, rate, flag = arrived([3, 0.5, True])
    assert count.weak_type and rate.weak_type and (count, rate, flag) == (3, 0.5, True)
    with pytest.raises(LoadError, match=r"batch\[0\] has 1099511627776"):
        arrived([2**40])


@pytest.mark.parametrize(
    "value, message",
    [
        (np.ma.array([1, 2], mask=[0, 1]), r"is a MaskedArray: write batch\['x'\].filled\(value\)"),
        (np.zeros(2, "datetime64[s]"), "is of datetime64.* JAX lacks"),
        (np.zeros(2, "timedelta64[s]"), "is of timedelta64.* JAX lacks"),
        (np.zeros(2, [("a", "i4")]), r"is a ndarray: write {field: batch\['x'\]\[field\] for"),
        (np.array(["a", None], object), "has objects of NoneType, str: pass one"),
        (np.zeros(2, "U3"), "is of <U3.* JAX lacks"),
    ],
)
def test_what_is_no_array_of_numbers_is_named_with_the_next_action(value, message):
    with pytest.raises(LoadError, match=r"load 0 failed: ValueError: batch\['x'\] " + message):
        arrived({"x": value, "y": np.zeros(2)})


def cut(*axes):
    """A sharding over four devices."""
    return NamedSharding(jax.make_mesh((4,), ("data",)), PartitionSpec(*axes))


@pytest.mark.parametrize(
    "batch,axes,message",
    [
        (
            {"x": np.zeros(8), "n": np.float32(3)},
            ["data"],
            r"batch\['n'\] has the shape \(\), which .* jax.P\(\)",
        ),
        ({"x": np.zeros(8), "n": 3}, ["data"], r"batch\['n'\] has the shape \(\)"),
        (
            (np.zeros((8, 4)), np.zeros(8)),
            [None, "data"],
            r"batch\[1\] has the shape \(8,\), which .*'data'",
        ),
        (
            {"x": np.zeros((2, 3))},
            ["data"],
            r"batch\['x'\] has the shape \(2, 3\), which .* cannot split: pad",
        ),
    ],
)
def test_what_a_sharding_cannot_hold_is_named(batch, axes, message):
    with prefetch_to_device([batch], sharding=cut(*axes)) as loader:
        with pytest.raises(LoadError, match=message):
            next(loader)


def test_a_scalar_has_a_sharding_of_its_own():
    batch, places = {"x": np.arange(8), "n": 3}, {"x": cut("data"), "n": cut()}
    with prefetch_to_device([batch], sharding=places) as loader:
        result = next(loader)
    assert result["n"] == 3 and result["x"].sharding == places["x"]


def test_a_last_batch_that_a_sharding_cannot_hold_is_refused_before_the_first():
    """18 examples in eights over four devices."""
    check_steps(as_source(np.zeros((18, 3))), [(8,), (4,)], cut("data"))
    check_steps(as_source([np.zeros(3)] * 18), [(8,), (2,)], None)
    check_steps(as_source([np.zeros(3)] * 18), [(2, 8)], cut(None, "data"))
    with pytest.raises(
        ValueError, match=r"batch\['x'\] has the shape \(2,\).* pad it or leave examples out"
    ):
        check_steps(as_source({"x": np.zeros(18)}), [(8,), (2,)], cut("data"))
    with pytest.raises(ValueError, match=r"batch has the shape \(2, 1, 3\).* cannot split"):
        check_steps(as_source([np.zeros(3)] * 18), [(2, 8), (2, 1)], cut(None, "data"))


def aligned(size):
    """Memory at an address that JAX takes as it is on a CPU."""
    raw = np.zeros(4 * size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + 4 * size].view(np.float32)


def in_arrow(size):
    return np.frombuffer(pytest.importorskip("pyarrow").allocate_buffer(4 * size), np.float32)


def in_torch(size):
    return pytest.importorskip("torch").from_numpy(aligned(size))


def ahead(loads):
    return prefetch_to_device(({"x": [load]} for load in loads), depth=3)


def over_devices(loads):
    return ({"x": [x]} for x in prefetch_to_device(loads, sharding=cut("data"), depth=3))


def on_another(loads):
    return ({"x": [x]} for x in prefetch_to_device(loads, sharding=jax.devices()[2], depth=3))


def as_a_pipeline(loads):
    order = ordering.random_reshuffling(5 * 4096, units_per_step=4096)
    return read_epochs(
        lambda *_: ({"x": [load]} for load in loads), order, jax.random.key(0), num_epochs=1
    )


def used_once(loads):
    return echo.repeat(({"x": [load]} for load in loads), echo.fixed(1))


@pytest.mark.parametrize("read", [ahead, over_devices, on_another, as_a_pipeline, used_once])
@pytest.mark.parametrize("make", [aligned, in_arrow, in_torch, lambda n: aligned(4 * n)[::4]])
def test_a_loader_may_fill_one_buffer_again_and_again(make, read):
    buffer = make(4096)

    def loads():
        for i in range(5):
            buffer[:] = i
            yield buffer

    batches = list(read(loads()))
    buffer[:] = 7
    assert [np.unique(batch["x"][0]).tolist() for batch in batches] == [[i] for i in range(5)]


CONTEXT = contextvars.ContextVar("CONTEXT", default="another")


def settings_there(seen):
    seen.append((jax.config.jax_enable_x64, jax.config.jax_default_matmul_precision))
    seen.append((jax.config.jax_default_device, CONTEXT.get(), jax.sharding.get_mesh().axis_names))
    seen.append((jax.config.jax_default_prng_impl, jax.config.jax_numpy_dtype_promotion))
    return np.float64(0.1)


def by_prefetch(seen):
    with prefetch_to_device(settings_there(seen) for _ in range(1)) as loader:
        return next(loader)


def by_decode(seen):
    source = type("Source", (), {"__len__": lambda s: 1, "read": lambda s, i, j: [b"a"]})()
    data = blocks.split([source], unit_size=1, decode=lambda record: settings_there(seen))
    order, key = ordering.baselines.shuffle_once(1), jax.random.key(0)
    read = blocks.read_blocks(data, order, key, batch_size=1, num_epochs=1)
    return next(read)[0]


def by_tf(seen):
    class Source(list):
        def __getitem__(self, i):
            return settings_there(seen)

    return jax.device_put(next(iter(ordering.data.tf_dataset(Source([0]), [0]))).numpy())


@pytest.mark.parametrize("read", [by_prefetch, by_decode, by_tf])
def test_threads_have_the_settings_of_the_call(read):
    seen, device = [], jax.devices()[2]
    with jax.enable_x64(True), jax.default_device(device), jax.default_matmul_precision("highest"):
        records = read(seen)
    assert records.dtype == np.float64 and records.devices() == {device}
    assert set(seen) == {(True, "highest"), (device, "another", ()), ("threefry2x32", "standard")}
    assert not jax.config.jax_enable_x64


def with_settings(read):
    def run(seen):
        with (
            jax.default_prng_impl("rbg"),
            jax.numpy_dtype_promotion("strict"),
            jax.set_mesh(jax.make_mesh((1,), ("data",))),
        ):
            return read(seen)

    context = contextvars.copy_context()
    context.run(CONTEXT.set, "this one")
    return lambda seen: context.run(run, seen)


@pytest.mark.parametrize("read", [by_prefetch, by_decode, by_tf])
def test_threads_have_the_mesh_the_kind_of_keys_and_the_context(read):
    seen = []
    with_settings(read)(seen)
    device = jax.config.jax_default_device
    assert set(seen[-2:]) == {(device, "this one", ("data",)), ("rbg", "strict")}
    assert jax.sharding.get_mesh().empty and CONTEXT.get() == "another"
