"""The numbers that a flag, a field of a `Recipe` or a choice of a task may be."""

from typing import NamedTuple

from syncopate.plans import inside
from syncopate.refusals import UserError


class Range(NamedTuple):
    """Numbers of one kind in an interval, such as "[0, 1)"; nan is in none."""

    kind: type  # int or float
    interval: str

    def __contains__(self, number) -> bool:
        known = inside(number, self.interval)
        return known and (self.kind is float or number == int(number))

    def __str__(self) -> str:
        return f"a {'whole ' * (self.kind is int)}number in {self.interval}"

    def check(self, name: str, number) -> None:
        """Raises ValueError, naming the flag, for a number outside."""
        if number not in self:
            raise UserError(f"--{name} is {number}: pass {self}.")


COUNT = Range(int, "[1, 2147483647]")  # int32, as steps and units are counted on the devices
FROM_ZERO = Range(int, "[0, 2147483647]")
COPIES = Range(int, "[3, 1000]")  # of a run, of which each may be left out
SEED = Range(int, "[0, 4294967295]")  # a larger one would be taken modulo 2^32
SHARE = Range(float, "[0, 1]")
MOMENTUM = Range(float, "[0, 0.9999999]")  # below 1 in float32 too
FACTOR = Range(float, "(0, 1]")
POSITIVE = Range(float, "(0, inf)")
FINITE = Range(float, "(-inf, inf)")
EPOCHS = Range(float, "(0, 2147483647]")
FLOAT32 = "3.4028235e38]"  # its largest number, in which steps compute
RATE = Range(float, f"(0, {FLOAT32}")
DECAY = Range(float, f"[0, {FLOAT32}")
# In seconds and in steps: the longest wait of a timer is 9.2e9 seconds.
SECONDS, WAIT = Range(float, "[0, 10000000]"), Range(float, "[1, 10000000]")
STEPS, SLOWNESS = Range(float, "[0, 1000000]"), Range(float, "(0, 1000000]")
SPEED = Range(float, "[0.001, inf)")  # in Gb/s or teraflops
