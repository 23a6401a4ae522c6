"""The base of all plans, and schedules evaluated on the host."""

import hashlib
import json
import os
from collections.abc import Callable
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Key

__all__ = ["Plan"]

MOST_STEPS = 10**9


def is_whole(value: Any) -> bool:
    """Whether a value is an integer other than a bool."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether a value is a real number other than a bool."""
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


def as_array(value: Any) -> tuple[np.ndarray, str]:
    """A value as an array, and how messages call it: "int64[3]", or "a list" if it is no array."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):  # keys, and lists of unequal lengths
        array = np.empty((), object)
    is_array = array.dtype.kind in "biufc"
    return array, f"{array.dtype}{list(array.shape)}" if is_array else f"a {type(value).__name__}"


def check_total_steps(total_steps: Any) -> None:
    """Raises ValueError unless T is an integer from 1 to 10^9, the longest array of steps."""
    if not is_whole(total_steps) or total_steps < 1:
        raise ValueError(f"total_steps is {total_steps!r}: pass an integer of at least 1.")
    if total_steps > MOST_STEPS:
        raise ValueError(
            f"total_steps is {total_steps}: a plan holds arrays of at most {MOST_STEPS:,} steps. "
            "Plan one part of the run at a time."
        )


def check_key(key: Any) -> None:
    """Raises ValueError unless it is a typed key or an array of typed keys."""
    dtype = getattr(key, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        legacy = dtype == np.uint32 and key.shape[-1:] == (2,)
        found = "a legacy key" if legacy else f"{key} ({type(key).__name__})"
        raise ValueError(
            f"key is {found}: pass a typed key, as jax.random.key(seed), or convert a legacy key "
            "with jax.random.wrap_key_data(key)."
        )


def evaluate_schedule(schedule: Callable | ArrayLike, total_steps: int, name: str) -> np.ndarray:
    """float64[T], the values of a schedule, a number or an array at the steps 0 .. T - 1.

    A schedule of JAX operations is called once for all steps, in float64; any other is called
    step by step. Raises ValueError, with the `name` of the values, if one is negative, not finite
    or complex, or if an array has another length than T.
    """
    check_total_steps(total_steps)
    if callable(schedule):
        values = _real(_evaluated(schedule, total_steps), name).reshape(total_steps)
    else:
        values = _real(np.asarray(schedule), name)
        if values.shape not in ((), (total_steps,)):
            raise ValueError(
                f"{name} has the shape {values.shape}: an array holds one value for each of the "
                f"{total_steps} steps."
            )
        values = np.broadcast_to(values, (total_steps,))
    bad = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
    if len(bad):
        raise ValueError(
            f"{name}({bad[0]}) is {values[bad[0]]:g}: the schedule must be finite and not "
            f"negative at all {total_steps} steps ({len(bad)} of them violate this)."
        )
    return values


def probabilities(p: Callable | ArrayLike, total_steps: int, name: str) -> np.ndarray:
    """float64[T], the values of `evaluate_schedule`; raises ValueError unless all are in (0, 1]."""
    values = evaluate_schedule(p, total_steps, name)
    bad = np.flatnonzero((values <= 0) | (values > 1))
    if len(bad):
        raise ValueError(
            f"{name}({bad[0]}) is {values[bad[0]]:g}: a probability lies in (0, 1]. Keep the "
            "schedule above 0."
        )
    return values


def bernoulli_draws(probabilities: np.ndarray, key: Key[Array, ""]) -> np.ndarray:
    """bool[T], true with each step's probability; with JAX's default keys the same everywhere."""
    check_key(key)
    with jax.ensure_compile_time_eval():  # now, even if the plan is made inside a trace
        coins = np.asarray(jax.random.uniform(key, (len(probabilities),), np.float32))
        return coins < probabilities


def describe_schedule(p: Any) -> str:
    """A number as it appears in a rule's name, or "p(t)" for a schedule."""
    return f"{p:g}" if isinstance(p, int | float) else "p(t)"


def _evaluated(schedule, total_steps):
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        device = None  # the default one; accelerators emulate float64
    # Evaluated now, even if the plan is made while a function is traced.
    with jax.enable_x64(True), jax.default_device(device), jax.ensure_compile_time_eval():
        try:
            # Not jitted: a compiler may rewrite t / 10 as t * 0.1, and the hash of a plan must not
            # depend on the machine.
            values = jax.vmap(schedule)(np.arange(total_steps))
        except (TypeError, jax.errors.JAXTypeError):
            values = [schedule(t) for t in range(total_steps)]
        return np.asarray(values)


def _real(values, name) -> np.ndarray:
    """The values in float64; raises ValueError unless they are real numbers."""
    try:
        if not np.iscomplexobj(values):
            return values.astype(np.float64)
    except (TypeError, ValueError):  # not numbers
        pass
    raise ValueError(f"{name} is {values.dtype}: the values of a schedule must be real numbers.")


class Plan:
    """The base of all plans: which of the T steps of a run are marked. Step 0 always is.

    A subclass has `total_steps`, the array of marked steps under the name in `marks`, and `rule`,
    a description of how it was made. Two plans of one class are equal if their hashes are.

    Class attributes:
      marks: the name of int64[n], the marked steps, also in saved files.
      stretches: what a marked step begins, in words: "rounds" or "loads".
      online: whether decisions are made during the run; False for plans.
    """

    marks: ClassVar[str]
    stretches: ClassVar[str]
    online: ClassVar[bool] = False

    total_steps: int
    rule: str

    @classmethod
    def of_marks(cls, marked: np.ndarray, total_steps: int, rule: str) -> Self:
        """A plan from int64[n], its marked steps."""
        raise NotImplementedError

    @property
    def marked(self) -> np.ndarray:
        """int64[n], the marked steps."""
        return getattr(self, self.marks)

    @property
    def lengths(self) -> np.ndarray:
        """int64[n], the number of steps from each marked one to the next or to the end."""
        return np.diff(self.marked, append=self.total_steps)

    def digest(self) -> str:
        """A hash (64 hex digits) of T and all marked steps; independent of machine and rule."""
        content = np.append(self.marked, self.total_steps).astype("<i8").tobytes()
        return hashlib.sha256(content).hexdigest()

    def __eq__(self, other):
        return isinstance(other, type(self)) and self.digest() == other.digest()

    def __hash__(self):
        return hash(self.digest())

    def __repr__(self):
        count = f"{len(self.marked)} {self.stretches} in {self.total_steps} steps"
        return f"{type(self).__name__}({self.rule}: {count})"

    def check_run(self, total_steps: int) -> None:
        """Raises ValueError unless the plan was made for a run of `total_steps`."""
        if total_steps != self.total_steps:
            raise ValueError(
                f"the plan ({self.rule}) has {self.total_steps} steps and the run {total_steps}: "
                "make the plan with the run's total_steps."
            )

    def describe(self) -> str:
        """A summary that fits one screen: rule, sizes, hash, and changes over the run."""
        sizes, table = self._summary()
        head = f"{self.total_steps} steps, {len(self.marked)} {self.stretches}, {sizes}"
        return "\n".join([self.rule, f"{head}, hash {self.digest()[:12]}", *table])

    def _summary(self) -> tuple[str, list[str]]:
        """For `describe`: the sizes in words, and the lines of a table with a header."""
        raise NotImplementedError

    def save(self, path: str) -> None:
        """Writes plan and hash as JSON, by way of a temporary file, so that no file is partial."""
        content = {
            "rule": self.rule,
            "total_steps": self.total_steps,
            self.marks: self.marked.tolist(),
            "digest": self.digest(),
        }
        temporary = f"{path}.tmp"
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(content, file)
        os.replace(temporary, path)

    @classmethod
    def read(cls, path: str) -> Self:
        """The plan that `save` wrote.

        Raises:
          ValueError: if the file holds no plan of this class, or does not match its hash.
        """
        try:
            with open(path, encoding="utf-8") as file:
                content = json.load(file)
            marked = np.asarray(content[cls.marks], np.int64)
            rule, digest = content["rule"], content["digest"]
            if not isinstance(rule, str):
                raise TypeError(f"its rule is {rule!r}, not a string")
            plan = cls.of_marks(marked, content["total_steps"], rule)
        except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
            raise ValueError(f"{path!r} holds no saved plan ({error!r}): save it again.") from error
        if plan.digest() != digest:
            raise ValueError(
                f"{path!r} does not match its hash: it was changed. Save the plan again."
            )
        return plan
