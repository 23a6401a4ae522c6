"""Arms and their words.

An arm is a row of each table of `rows`, with options: the words "cd_grab+sketch256+qsr" name a row
of two tables and an option of the first, and so do --order=cd_grab --sketch=256 --sync=qsr.
"""

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from experiments.compare.rows import TABLES, Option
from experiments.trainer.config import RunConfig
from syncopate.command import meant
from syncopate.refusals import UserError


def options_of(kind: str, name: str | None = None) -> dict[str, Option]:
    """The options of a row, or of all rows of a table, by their keyword."""
    rows, options = TABLES[kind].values() if name is None else [TABLES[kind][name]], {}
    for of_row in sorted(map(_options, rows), key=len, reverse=True):
        for flag, option in of_row.items():
            words = {**option.words, **(options[flag].words if flag in options else {})}
            options[flag] = option._replace(words=words)
    return options


def _options(row: Any) -> dict[str, Option]:
    """The options of a row: keywords of its function, and of the rule that this is given."""
    functions = filter(callable, (row, *getattr(row, "args", ())))
    parameters = [p for f in functions for p in inspect.signature(f).parameters.values()]
    return {p.name: p.annotation for p in parameters if isinstance(p.annotation, Option)}


def choices_of(kind: str) -> str:
    """All words of a table, for people."""
    options = options_of(kind).items()
    further = (word for flag, option in options for word in option.words or [f"{flag}N"])
    return f"{', '.join(TABLES[kind])}, and of +{', +'.join(further)}"


def parsed(text: str, kinds: Iterable[str] = tuple(TABLES)) -> dict[str, dict[str, str]]:
    """{kind: {kind: a row's name, option: its word}} of words such as "cd_grab+sketch64+qsr".

    Words of other tables than these kinds are refused.
    """
    result: dict[str, dict[str, str]] = {}
    for word in text.split("+"):
        try:
            kind, flag = _flag_of(word, kinds)
        except UserError as error:  # of a number out of range
            raise UserError(f"{text!r} has {word!r}: {error}") from error
        if kind is None:
            choices = "; ".join(f"--{kind}: {choices_of(kind)}" for kind in kinds)
            near = meant(word, [w for kind in kinds for w in re.findall(r"\w+", choices_of(kind))])
            raise UserError(f"{text!r} has {word!r}, which is no word: choose of {choices}.{near}")
        words = result.setdefault(kind, {})
        if flag in words:
            raise UserError(f"{text!r} says --{flag} twice, {words[flag]} and {word}: leave one.")
        words[flag] = word
    for kind, words in result.items():
        if kind not in words:
            names = f"name one of {', '.join(TABLES[kind])} too"
            raise UserError(f"{text!r} has a --{next(iter(words))} and no --{kind}: {names}.")
    return {kind: {kind: words[kind]} | words for kind, words in result.items()}


def _flag_of(word: str, kinds: Iterable[str]) -> tuple[str | None, str]:
    """The table that a word belongs to, and its flag."""
    for kind in kinds:
        if word in TABLES[kind]:
            return kind, kind
        for flag, option in options_of(kind).items():
            if option.value(flag, word) is not None:
                return kind, flag
    return None, word


@functools.cache  # programs are shared by rows that are the same
def row_of(kind: str, text: str) -> Any:
    """What a row of a table gives with options, of words such as "cd_grab+sketch64" of "order"."""
    (words,) = parsed(text, (kind,)).values()
    name, values, labels = words.pop(kind), {}, []
    options = {row: options_of(kind, row) for row in TABLES[kind]}
    for flag, word in words.items():
        able = {row: of[flag].value(flag, word) for row, of in options.items() if flag in of}
        if able.get(name) is None:
            rows = ", ".join(row for row, value in able.items() if value is not None)
            raise UserError(
                f"--{kind} is {'+'.join([name, *words.values()])}: {name} cannot be {word} "
                f"(--{flag}): choose one of {rows}, or leave {word} out."
            )
        option, values[flag] = options[name][flag], able[name]
        shown = word if option.words else values[flag]
        labels.append(option.label.format(option.names.get(word, shown)))
    row = TABLES[kind][name]
    row = row(**values) if callable(row) else row
    return row._replace(label=", ".join([row.label, *labels]))


class Arm:
    """One side of a comparison: an order, a synchronisation rule and an echo policy.

    Args:
      label: for people; that of its rows if None.
      order, sync, echo: words of ORDERS, SYNC_RULES and ECHO_POLICIES.
      rate_factor: of the learning rates that are tried.

    Example:
      >>> arm = Arm(order="cd_grab+sketch64", sync="qsr")
      >>> arm.label
      'CD-GraB, 64 numbers + QSR + no echo'
    """

    def __init__(
        self,
        label: str | None = None,
        order: str = "rr+dealt",
        sync: str = "parallel",
        echo: str = "none",
        *,
        rate_factor: Callable[[RunConfig], float] = lambda run: 1,
    ):
        self.words = {"order": order, "sync": sync, "echo": echo}
        self.rows = tuple(row_of(kind, text) for kind, text in self.words.items())
        self.label = " + ".join(row.label for row in self.rows) if label is None else label
        self.rate_factor = rate_factor


def arm_of(text: str, **usual: str) -> Arm:
    """Makes an arm from words; `usual` are decisions that they leave open.

    Example:
      >>> arm_of("cd_grab+sketch64+qsr").label
      'CD-GraB, 64 numbers + QSR'
    """
    chosen = {kind: "+".join(words.values()) for kind, words in parsed(text).items()}
    label = " + ".join(row_of(kind, chosen[kind]).label for kind in TABLES if kind in chosen)
    return Arm(label, **usual | chosen)


def arms_of(names: Iterable[str], named: Mapping[str, Arm], **usual: str) -> dict[str, Arm]:
    """The arms of these names: those of `named` first, in its order, then others by their words."""
    names, others = dict.fromkeys(names), {}
    for name in names:
        if name not in named:
            try:
                others[name] = arm_of(name, **usual)
            except UserError as error:
                listed = ", ".join(named)
                raise UserError(f"--arms has {name!r}, none of {listed}: {error}") from error
    return {name: arm for name, arm in named.items() if name in names} | others
