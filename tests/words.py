"""The rows of the tables of decisions that tests go through: names, and words that change them."""


def further(table) -> dict[str, str]:
    """{word: its flag} of all further words of a table; of numbers one stands for all."""
    return {
        word: flag
        for flag, choice in table.choices.items()
        for word in ([f"{flag}16"] if callable(choice.words) else choice.words)
    }


def taken(table, name) -> dict[str, str]:
    """{word: its flag} of the further words that a row takes."""
    return {w: flag for w, flag in further(table).items() if {w, flag} & {*table[name].takes}}


def each(table) -> list[str]:
    """Every row, and every further word once, on the last row that takes it."""
    changed = {word: complete(name, word) for name in table for word in taken(table, name)}
    return [*table, *changed.values()]


def complete(name: str, word: str) -> str:
    """A row with a word, after what it needs: a team signs sketches."""
    return f"{name}+sketch16+{word}" if word.startswith("team") else f"{name}+{word}"


def all_rows(table) -> list[str]:
    """Every row with every word that it takes, and with as many as go together."""
    found = []
    for name in table:
        mine = taken(table, name)
        # A correction of the drift and a wire do not go together.
        together = {flag: word for word, flag in mine.items() if flag != "correction"}
        found += [name, *(complete(name, word) for word in mine)]
        found += ["+".join([name, *together.values()])] if len(together) > 1 else []
    return found
