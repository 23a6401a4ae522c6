"""Batches arrive on the device with the values that they had, or are refused by name."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import ordering
from ordering import blocks, echo
from ordering.data import LoadError, prefetch_to_device, read_epochs

BIG = np.array([2**31 + 1, 2**40 + 9, 2**32 + 7])


def arrived(batch):
    """What a step gets of a batch."""
    with prefetch_to_device([batch]) as loader:
        return next(loader)


def by_epochs(source):
    state = ordering.shuffle_once(len(source)).init(jax.random.key(0), None)
    return read_epochs({"id": source}, lambda: state, units_per_step=1, num_epochs=1)


def by_blocks(source):
    state = ordering.shuffle_once(len(source)).init(jax.random.key(0), None)
    data = blocks.split({"id": source}, unit_size=1)
    return blocks.read_blocks(data, lambda: state, window=1, batch_size=1, num_epochs=1)


def by_echo(source):
    return echo.echo_batches([{"id": source}], echo.fixed(1, total_steps=1))


def by_load_ahead(source):
    return prefetch_to_device([{"id": source}])


@pytest.mark.parametrize("read", [by_epochs, by_blocks, by_echo, by_load_ahead])
@pytest.mark.parametrize("source", [BIG, BIG.astype(np.uint64), np.array([1e39, 0.0, -1e300])])
def test_no_reader_changes_a_value(read, source):
    with pytest.raises(LoadError, match=r"\['id'\] has .*, and JAX makes .*32.*JAX_ENABLE_X64=1"):
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
    found = arrived({"a": [fits]})["a"][0]
    assert found.dtype == wanted
    np.testing.assert_array_equal(found, fits.astype(wanted))
    with pytest.raises(LoadError, match=r"the batch\['a'\]\[0\] has .* which does not hold it"):
        arrived({"a": [beyond]})


def test_with_x64_values_stay_as_they_are():
    """On the loader's thread, too, which reads the setting of all threads."""
    old = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    try:
        for array in (BIG, np.array([1e300])):
            found = arrived(array)
            assert found.dtype == array.dtype
            np.testing.assert_array_equal(found, array)
    finally:
        jax.config.update("jax_enable_x64", old)


def test_types_of_32_bits_and_fewer_arrive_as_they_are():
    arrays = [np.arange(3).astype(kind) for kind in (
        np.uint32, np.int8, np.uint16, np.bool_, np.float16, ml_dtypes.bfloat16, ml_dtypes.int4,
        ml_dtypes.float8_e5m2)]  # fmt: skip
    arrays.append(np.array([2**32 - 1], np.uint32))
    for found, array in zip(arrived(arrays), arrays, strict=True):
        assert found.dtype == array.dtype
        np.testing.assert_array_equal(np.asarray(found), array)
    on_device = jnp.arange(3)
    assert arrived([on_device])[0] is on_device


def test_other_byte_orders_are_turned():
    for kind in (">i4", ">u2", ">f4", ">i8", ">f8"):
        array = np.array([1, 2, 300]).astype(kind)
        found = arrived(array)
        assert found.dtype.isnative and found.tolist() == [1, 2, 300]
    with pytest.raises(LoadError, match="2147483648, and JAX makes int32"):
        arrived(np.array([2**31]).astype(">i8"))


def test_numbers_of_python_keep_their_weak_types():
    count, rate, flag = arrived([3, 0.5, True])
    assert count.weak_type and rate.weak_type and (count, rate, flag) == (3, 0.5, True)
    with pytest.raises(LoadError, match=r"the batch\[0\] has 1099511627776"):
        arrived([2**40])


@pytest.mark.parametrize(
    "value, message",
    [
        (np.ma.array([1, 2], mask=[0, 1]), r"is a masked array: fill its missing values in"),
        (np.zeros(2, "datetime64[s]"), "is of datetime64.*pass times as numbers"),
        (np.zeros(2, "timedelta64[s]"), "is of timedelta64.*pass times as numbers"),
        (np.zeros(2, [("a", "i4")]), "is of .*'a'.*pass the fields of structured arrays as a dict"),
        (np.array(["a", None], object), "is of object, as 'a'.*leave texts and other objects out"),
        (np.zeros(2, "U3"), "is of <U3.*leave texts and other objects out"),
    ],
)
def test_what_is_no_array_of_numbers_is_named_with_the_next_action(value, message):
    with pytest.raises(LoadError, match=r"load 0 failed: ValueError: the batch\['x'\] " + message):
        arrived({"x": value, "y": np.zeros(2)})
