"""Words that are not to come back: the field has others, which a stranger knows."""

import json
import pathlib
import re
import subprocess
import types

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Not in a name, alone or between underscores; in a sentence they are English. {word: what to say}.
NAMES = {
    "agree": "equal, coordination",
    "against": "baseline, difference",
    "alike": "equal, same",
    "apart": "distance, independent",
    "dealt": "global",
    "found": "result, or what it is",
    "known": "choices, metadata, scalars",
    "living": "members",
    "meet": "barrier, sync",
    "met": "members, products",
    "own": "what of it: the arm, the process, its state",
    "patience": "timeout",
    "said": "output",
    "settle": "converge",
    "settled": "reconciled",
    "told": "message, expected",
    "whose": "owner",
}
# Nowhere: terms that only we had, in names, comments, messages and pages.
TERMS = {
    r"lift(?:s|ed|ing)?": "map_workers",
    "meetings?": "syncs",
    "owned": "per_worker, replicated",
    "priced": "modelled",
    "wires?": "compressor",
}
TERM = re.compile(rf"(?<![a-z])(?:{'|'.join(f'({term})' for term in TERMS)})(?![a-z])", re.I)
BLOCK = re.compile(r"```python\n(.*?)```", re.S)


def texts(*kinds: str) -> dict[str, str]:
    """{path: text} of the files of these kinds that git tracks, without this one."""
    listed = subprocess.check_output(["git", "ls-files", "-z", *kinds], cwd=ROOT, text=True)
    paths = [ROOT / name for name in listed.split("\0") if name]
    return {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
        for path in paths
        if path.is_file() and path != pathlib.Path(__file__)
    }


def programs(path: str, text: str) -> list[str]:
    if path.endswith(".md"):
        return BLOCK.findall(text)
    if path.endswith(".ipynb"):
        cells = [c for c in json.loads(text)["cells"] if c["cell_type"] == "code"]
        return ["".join(c["source"]) for c in cells if "%" not in "".join(c["source"])]
    return [text]


def names(code: types.CodeType) -> set[str]:
    """What a program binds and reads."""
    inner = [names(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    return {*code.co_names, *code.co_varnames, *code.co_cellvars}.union(*inner)


def private_names(path: str, text: str) -> list[str]:
    code = [compile(program, path, "exec", dont_inherit=True) for program in programs(path, text)]
    modules = path.removesuffix(".py").split("/") if path.endswith(".py") else []
    every = set(modules).union(*map(names, code))
    every = {name for name in every if not name.startswith("test_")}  # these are sentences
    split = [(name, part) for name in every for part in name.lower().split("_")]
    return [f"{path}: {name} ({NAMES[part]})" for name, part in split if part in NAMES]


def private_terms(path: str, text: str) -> list[str]:
    words = list(TERMS.values())
    return [f"{path}: {m[0]} ({words[m.lastindex - 1]})" for m in TERM.finditer(text)]


def test_names_are_words_of_the_field():
    every = texts("*.py", "*.md", "*.ipynb")
    wrong = [line for file in every.items() for line in private_names(*file)]
    assert not wrong, "\n".join(sorted(wrong))


def test_terms_are_those_of_the_field():
    every = texts("*.py", "*.md", "*.ipynb", "*.yml", "*.cfg", "*.toml", "*.flags", "*.diff")
    wrong = [line for file in every.items() for line in private_terms(*file)]
    assert not wrong, "\n".join(sorted(wrong))


def test_a_private_word_is_seen():
    seen = "def f(*, own_rows, shown):\n  x = shown.told\n  return [known for known in x]"
    assert [line.split()[1] for line in sorted(private_names("page.py", seen))] == [
        "known",
        "own_rows",
        "told",
    ]
    assert private_names("a.md", "found\n```python\nfound = 3\n```") != []
    assert private_names("a/known_rows.py", "unknown = founded = 1") == [
        "a/known_rows.py: known_rows (choices, metadata, scalars)"
    ]
    assert private_terms("a.md", "It lifts a top_k_wire.") == [
        "a.md: lifts (map_workers)",
        "a.md: wire (compressor)",
    ]
    assert not private_terms("a.md", "shoplifting, wired")
