"""The rows of the tables of decisions that tests go through: names, and words that change them."""

import contextlib

from experiments.compare.arms import options_of
from experiments.compare.rows import TABLES, Option
from syncopate.refusals import UserError


def further(kind: str) -> dict[str, str]:
    """{word: its flag} of all options of a table; of numbers one stands for all."""
    return taken(kind, None)


def taken(kind: str, name: str | None) -> dict[str, str]:
    """{word: its flag} of the options that a row takes."""
    return {
        word: flag
        for flag, option in options_of(kind, name).items()
        for word in option.words or [_number(flag, option)]
    }


def _number(flag: str, option: Option) -> str:
    """The word of the first of these numbers that an option takes."""
    for number in ("0.5", "16", "2", "1"):
        with contextlib.suppress(UserError):
            option.value(flag, word := f"{flag}{number}")
            return word
    raise AssertionError(f"no number is known that --{flag} takes")


def each(kind: str) -> list[str]:
    """Every row, and every word of an option once, on the last row that takes it."""
    table = TABLES[kind]
    changed = {word: complete(name, word) for name in table for word in taken(kind, name)}
    return [*table, *changed.values()]


def complete(name: str, word: str) -> str:
    """A row with a word, after what it needs: a team signs sketches."""
    return f"{name}+sketch16+{word}" if word.startswith("team") else f"{name}+{word}"


def all_rows(kind: str) -> list[str]:
    """Every row with every word that it takes, and with as many as go together."""
    results = []
    for name in TABLES[kind]:
        mine = taken(kind, name)
        # A correction of the drift and a compressor do not go together.
        together = {flag: word for word, flag in mine.items() if flag != "correction"}
        results += [name, *(complete(name, word) for word in mine)]
        results += ["+".join([name, *together.values()])] if len(together) > 1 else []
    return results
