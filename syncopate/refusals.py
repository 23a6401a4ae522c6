"""The error of commands for what a user can correct, and intervals of numbers."""


class UserError(ValueError):
    """A mistake in what the user wrote: commands print it in one line, without a traceback."""


def inside(number: float, interval: str) -> bool:
    """Whether a number is in an interval, as "(0, 1]"; NaN is in none."""
    least, most = map(float, interval[1:-1].split(","))
    above = least < number if interval[0] == "(" else least <= number
    return above and (number < most if interval[-1] == ")" else number <= most)
