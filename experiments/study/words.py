"""What a row of the tables of decisions is, and how further words change one."""

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import local_opt
import ordering
from experiments.training.config import OrderSetting, RunConfig


class Order(NamedTuple):
    """A row of ORDERS: which unit comes next.

    Fields:
      label: for people.
      make: from the setting to the `ordering.Ordering`.
      observes: False if it looks at no gradient: its next order is made beside the steps.
      coordinated: True if its running sum is of all workers.
      sketch: k, if it looks at sketches of so many numbers; None: at gradients.
      deals: EXAMPLES or UNITS of the whole training set, if its numbers name these; None: units of
        the worker's own.
      takes: flags of further words that may change it, or some of these words.
    """

    label: str
    make: Callable[[OrderSetting], ordering.Ordering]
    observes: bool = True
    coordinated: bool = False
    sketch: int | None = None
    deals: str | None = None
    takes: tuple[str, ...] = ()


class SyncRule(NamedTuple):
    """A row of SYNC_RULES: `plan` gives the SyncPlan, and `rounds` what a step and a sync do."""

    label: str
    plan: Callable[[RunConfig], local_opt.SyncPlan]
    rounds: Callable = local_opt.local_rounds  # (inner optimizer, axis_name=) -> Rounds
    wire: local_opt.Wire | None = None  # in which `rounds` sends changes
    takes: tuple[str, ...] = ()


class EchoPolicy(NamedTuple):
    """A row of ECHO_POLICIES; an `online` one decides while the run goes on."""

    label: str
    make: Callable[[RunConfig], Any]
    online: bool = False
    takes: tuple[str, ...] = ()


class Word(NamedTuple):
    """What a row is called and does besides: `change` makes the other row."""

    label: str
    change: Callable


class Choice(NamedTuple):
    """The words of one flag: a table, or what makes one of a whole number, as of "sketch256"."""

    text: str
    words: Mapping[str, Word] | Callable[[int], Word]


class Table(dict):
    """Rows by name; `table["name+word+word"]` is a row that further words have changed.

    Args:
      kind: what a row is, in words; rows: by name; choices: by flag.
    """

    def __init__(self, kind: str, rows: Mapping, choices: Mapping[str, Choice]):
        super().__init__(rows)
        self.kind, self.choices = kind, choices
        self._changed = functools.cache(self._change)  # equal words give the same row

    def __missing__(self, text: str):
        return self._changed(text)

    def find(self, word: str) -> tuple[str, Word] | None:
        """The flag of a further word, and its row; None if there is none."""
        for flag, choice in self.choices.items():
            if not callable(choice.words):
                if word in choice.words:
                    return flag, choice.words[word]
            elif number := re.fullmatch(rf"{flag}([1-9]\d*)", word):
                return flag, choice.words(int(number[1]))
        return None

    def known(self) -> str:
        """All words, for people."""
        further = [
            word
            for flag, choice in self.choices.items()
            for word in ([f"{flag}N"] if callable(choice.words) else choice.words)
        ]
        return f"{', '.join(self)}, and of +{', +'.join(further)}"

    def _change(self, text: str):
        name, *further = text.split("+")
        if name not in self:
            raise ValueError(f"{name!r} is no {self.kind}: choose of {self.known()}.")
        row, taken = self[name], {}
        for word in further:
            if (found := self.find(word)) is None:
                known = self.known()
                raise ValueError(f"{word!r} says nothing of this {self.kind}: choose of {known}.")
            flag, (label, change) = found
            if flag in taken:
                raise ValueError(
                    f"{text!r} has {taken[flag]} and {word}, both of --{flag}: choose one of them."
                )
            if not {flag, word} & {*row.takes}:
                able = [n for n, other in self.items() if {flag, word} & {*other.takes}]
                raise ValueError(
                    f"{text!r}: {name} cannot be {word} (--{flag}); choose one of "
                    f"{', '.join(able)}, or leave {word} out."
                )
            taken[flag] = word
            row = change(row)._replace(label=f"{row.label}, {label}")
        return row


def parse(text: str, tables: Mapping[str, Table]) -> dict[str, str]:
    """{kind of table: the words of its row} of words of all tables, joined by +.

    Raises:
      ValueError: for a word that no table has, or a row that cannot be changed so.
    """
    found = {}
    for word in text.split("+"):
        kind = next((k for k, t in tables.items() if word in t or t.find(word)), None)
        if kind is None:
            known = "; ".join(table.known() for table in tables.values())
            raise ValueError(f"{word!r} is no word: choose of {known}.")
        found[kind] = f"{found[kind]}+{word}" if kind in found else word
    for kind, words in found.items():
        tables[kind][words]  # refuses what does not fit together
    return found
