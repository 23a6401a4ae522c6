"""The base of all plans, and checks of arguments."""

import contextlib
import dataclasses
import hashlib
import inspect
import json
import operator
import os
import secrets
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from syncopate.mesh import typed_key
from syncopate.refusals import inside
from syncopate.unstable import multihost_utils

__all__ = ["Plan"]

MOST_STEPS = 10**7  # of a plan


def is_whole(value: Any) -> bool:
    """Whether a value is an integer other than a bool."""
    try:
        return operator.index(value) is not None and not isinstance(value, bool)
    except TypeError:
        return False


def is_number(value: Any) -> bool:
    """Whether a value is a real number other than a bool; NaN and infinity are."""
    if not isinstance(value, int | float | np.number | np.ndarray | jax.Array):
        return False
    array, _ = as_array(value)
    return not array.ndim and array.dtype.kind in "iuf"


def check_whole(name: str, value: Any, least: int, most: int | None = None) -> int:
    """The value as an int; raises ValueError unless it is a whole number in the range."""
    whole = operator.index(value) if is_whole(value) else least - 1
    if whole < least or (most is not None and whole > most):
        bounds = f"of at least {least}" if most is None else f"in {least} .. {most}"
        raise ValueError(f"{name} is {value!r}: pass a whole number {bounds}{if_traced(value)}.")
    return whole


def check_number(name: str, value: Any, interval: str) -> float:
    """The value as a float; raises ValueError unless it is in the interval, such as "(0, 1]"."""
    number = float(value) if is_number(value) else np.nan
    if not inside(number, interval):
        raise ValueError(
            f"{name} is {value!r}: pass a finite number in {interval}{if_traced(value)}."
        )
    return number


def if_traced(value: Any) -> str:
    """What a message adds for a number that is only known when a compiled program runs."""
    traced = isinstance(value, Tracer)
    return ", outside of jax.jit and jax.lax.scan, or as a static argument" if traced else ""


@jax.transfer_guard("allow")
def as_array(value: Any) -> tuple[np.ndarray, str]:
    """A value as an array, and its name in messages: "int64[3]", or "a list" if it is no array."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):  # keys, and lists of unequal lengths
        array = np.empty((), object)
    is_array = array.dtype.kind in "biufc"
    return array, f"{array.dtype}{list(array.shape)}" if is_array else f"a {type(value).__name__}"


def check_total_steps(total_steps: Any) -> int:
    """T as an int; raises ValueError unless it is a whole number from 1 to 10^7."""
    return check_whole("total_steps", total_steps, 1, MOST_STEPS)


def check_function(name: str, value: Any, *arguments: str) -> None:
    """Raises ValueError unless a value can be called with so many arguments."""
    try:
        inspect.signature(value).bind(*arguments)
    except TypeError:
        text = getattr(value, "__name__", f"a {type(value).__name__}")
        wanted = f"({', '.join(arguments)})"
        raise ValueError(f"{name} is {text}: pass a function of {wanted}.") from None
    except ValueError:  # a built-in function without a signature
        pass


def check_key(key: Any, advice: str = "pass one key, as key[0].") -> jax.Array:
    """The key, typed; raises ValueError unless it is one. The advice is for an array of keys."""
    key = typed_key(key)
    if not jnp.issubdtype(getattr(key, "dtype", object), jax.dtypes.prng_key):
        raise ValueError(
            f"key is {key} ({type(key).__name__}): pass a typed key, as jax.random.key(seed)."
        )
    if key.shape:
        raise ValueError(f"key has shape {key.shape}: {advice}")
    return key


def check_like(
    name: str, tree: Any, other: Any, of: str, act: str = "pass a tree of the same leaves."
) -> None:
    """Raises ValueError, ending with `act`, unless two trees have leaves of the same shapes."""
    leaves, wanted = _leaves(tree), _leaves(other)
    for leaf in wanted | leaves:
        if leaves.get(leaf) != wanted.get(leaf):
            raise ValueError(
                f"{name}{leaf} is {leaves.get(leaf, 'missing')} and in {of} "
                f"{wanted.get(leaf, 'missing')}: {act}"
            )


def _leaves(tree):
    """{path: kind and shape} of all leaves."""

    def kind(x):
        try:
            aval = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
        except TypeError:
            return f"a {type(x).__name__}"
        is_complex = jnp.issubdtype(aval.dtype, jnp.complexfloating)
        return f"{'complex' if is_complex else 'real'}{list(aval.shape)}"

    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): kind(x) for path, x in leaves}


@dataclasses.dataclass(frozen=True, eq=False, repr=False, init=False)
class Plan:
    """The base of all plans: which of the T steps of a run are marked. Step 0 always is.

    Two plans of one class are equal if their hashes are.

    Args:
      marked: int64[n], the marked steps: 0 first, strictly increasing, below T.
      total_steps: T in 1 .. 10^7.
      rule: a description of how the plan was made.
    """

    _marks: ClassVar[str]  # the name of the marked steps, also in saved files
    _stretches: ClassVar[str]  # what a marked step begins: "rounds" or "loads"
    online: ClassVar[bool] = False  # whether decisions are made during the run

    _bounds: np.ndarray  # int64[n + 1], read-only: the marked steps and T
    rule: str

    def __init__(self, marked: Any, total_steps: int, rule: str):
        marked, text = as_array(marked)
        total_steps = check_total_steps(total_steps)
        if marked.ndim != 1 or marked.dtype.kind not in "iu" or not len(marked):
            raise ValueError(
                f"{self._marks} is {text}: it must be a list of the whole numbers of the steps at "
                f"which {self._stretches} start."
            )
        bounds = np.append(marked.astype(np.int64), total_steps)
        if bounds[0] != 0 or (np.diff(bounds) < 1).any():
            raise ValueError(
                f"{self._marks} go from {marked[0]} to {marked[-1]}: they must begin at 0, "
                f"increase strictly and end below the {total_steps} steps of the run."
            )
        if not isinstance(rule, str):
            raise ValueError(f"rule is {rule!r}: describe the plan in words.")
        bounds.setflags(write=False)
        object.__setattr__(self, "_bounds", bounds)
        object.__setattr__(self, "rule", rule)

    @property
    def total_steps(self) -> int:
        """T, the number of steps of the run."""
        return int(self._bounds[-1])

    @property
    def _marked(self) -> np.ndarray:
        """int64[n], the marked steps."""
        return self._bounds[:-1]

    @property
    def _lengths(self) -> np.ndarray:
        """int64[n], the number of steps from each marked one to the next or to the end."""
        return np.diff(self._bounds)

    def digest(self) -> str:
        """A hash (64 hex digits) of all marked steps and T; independent of machine and rule."""
        return hashlib.sha256(self._bounds.astype("<i8").tobytes()).hexdigest()

    def check_same(self) -> None:
        """Raises ValueError if processes have other plans: they would meet at other steps."""
        local = np.frombuffer(bytes.fromhex(self.digest()), np.uint8)
        digests = np.reshape(multihost_utils.process_allgather(local), (-1, local.size))
        other = np.flatnonzero((digests != digests[0]).any(axis=1))
        if len(other):
            raise ValueError(
                f"processes {other.tolist()} have another plan than process 0 (here: {self.rule}, "
                f"hash {self.digest()[:12]}): give all of them the same flags, schedule and key, "
                "or save the plan once and load it everywhere."
            )

    def __eq__(self, other):
        return isinstance(other, type(self)) and self.digest() == other.digest()

    def __hash__(self):
        return hash(self.digest())

    def __repr__(self):
        count = f"{len(self._marked)} {self._stretches} in {self.total_steps} steps"
        return f"{type(self).__name__}({self.rule}: {count})"

    def describe(self) -> str:
        """A summary that fits one screen: rule, sizes, hash, and changes over the run."""
        sizes, table = self._summary()
        head = f"{self.total_steps} steps, {len(self._marked)} {self._stretches}, {sizes}"
        return "\n".join([self.rule, f"{head}, hash {self.digest()[:12]}", *table])

    def _summary(self) -> tuple[str, list[str]]:
        """For `describe`: the sizes in words, and the lines of a table with a header."""
        raise NotImplementedError

    def save(self, path: str | os.PathLike) -> None:
        """Writes the plan and its hash as JSON, to a temporary file first: no file is ever partial.

        A symbolic link at the path is replaced, not followed.
        """
        content = self._content() | {"digest": self.digest()}
        name = os.fsdecode(path)
        temporary = os.path.join(os.path.dirname(name), f".{secrets.token_hex(16)}.tmp")
        try:
            with open(temporary, "x", encoding="utf-8") as file:
                file.write(json.dumps(content, allow_nan=False))
            os.replace(temporary, name)
        except BaseException:
            with contextlib.suppress(OSError):
                os.remove(temporary)
            raise

    def _content(self) -> dict[str, Any]:
        """What `save` writes."""
        marks = {self._marks: self._marked.tolist()}
        return {"rule": self.rule, "total_steps": self.total_steps, **marks}

    @classmethod
    def _of_content(cls, content: dict[str, Any]) -> Self:
        """The plan that has this content; raises an error for other content."""
        marked = content[cls._marks]
        if not isinstance(marked, list) or {*map(type, marked)} != {int}:
            raise TypeError(f"its {cls._marks} must be a list of whole numbers")
        plan = object.__new__(cls)
        Plan.__init__(plan, marked, content["total_steps"], content["rule"])
        return plan

    @classmethod
    def read(cls, path: str | os.PathLike) -> Self:
        """The plan that `save` wrote.

        Raises:
          ValueError: if the file holds no plan of this class, or does not match its hash.
        """
        name = os.fsdecode(path)
        with open(name, "rb") as file:
            text = file.read()
        try:
            content = json.loads(text.decode("utf-8"))
            plan, digest = cls._of_content(content), content["digest"]
        except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
            why = f"{type(error).__name__}: {error}"[:200]
            raise ValueError(f"{name!r} holds no saved plan ({why}): save it again.") from error
        if plan.digest() != digest:
            raise ValueError(
                f"{name!r} does not match its hash: it was changed. Save the plan again."
            )
        return plan
