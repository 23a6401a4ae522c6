"""Sentences are short and begin with what they speak of, so that a stranger reads them once."""

import ast
import inspect
import io
import re
import tokenize

from tests.project.test_words import texts

LONGEST = 35  # words; code, equations, links, tables and references are left out
END = re.compile(r"(?<!e\.g)(?<!\bal)[.!?;][\"')\]*]*\s+")
LEFT_OUT = re.compile(r"```.*?```|\$\$.*?\$\$|<!--.*?-->|``[^`]+``|`[^`]+`|\$[^$\n]+\$", re.S)
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
# An item, a heading, an entry of `Args:`, a row of a table: the sentence before it has ended.
BEGINS = re.compile(
    r"[-*+|>#!<:] ?|\d+[.)] |\w[\w*, ]*( \([^)]*\))?:(\s|$)|.*\S {3,}\S|.*https?://"
)
# Genitives at the beginning, after which the subject comes late or never.
INVERTED = re.compile(
    r"Of (an?|all|each|every|its?|one|the|these|this|those|two|what|which|\d[\d,]*) [^.]*[,:.]"
    r"|Of [A-Za-z]+: |.*\b(what (it|they) (is|are) of|those of which)\b"
)


def paragraphs(text: str) -> list[str]:
    """The prose of a page or docstring, without indented code."""
    lines, code = [""], False
    for line in [*LINK.sub(r"\1", LEFT_OUT.sub(" ", text)).splitlines(), ""]:
        code = line.startswith("    ") and (code or not lines[-1])
        if not line.strip() or code or BEGINS.match(line.strip()):
            lines.append("")
        if line.strip() and not code and not re.match(r"[|>]|.*\S {3,}\S|.*http", line.strip()):
            lines[-1] = f"{lines[-1]} {line.strip()}".strip()
    return [line for line in lines if line]


def comments(text: str) -> list[str]:
    """Comments of a program; those on neighbouring lines are one."""
    every, last = [], 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not re.match(r"#!|# (fmt|noqa|type)", token.string):
            alone, line = token.line.lstrip().startswith("#"), token.start[0]
            joins = alone and line == last + 1
            before = every.pop() + "\n" if joins else ""
            every.append(before + token.string.lstrip("# "))
            last = line if alone else 0
    return every


def prose(path: str, text: str) -> list[str]:
    """The texts of a file that people read."""
    if not path.endswith(".py"):
        return [text]
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    documents = [ast.get_docstring(n) for n in ast.walk(ast.parse(text)) if isinstance(n, kinds)]
    plain = [re.sub(r"^ *>>> .*?(\n\s*\n|\Z)", "\n", d, flags=re.S | re.M) for d in documents if d]
    return [inspect.cleandoc(d) for d in plain] + comments(text)


def tangled(path: str, text: str) -> list[str]:
    """Sentences of a file that are too long, or that begin with a genitive."""
    every = [p for piece in prose(path, text) for p in paragraphs(piece)]
    sentences = [s for paragraph in every for s in END.split(paragraph)]
    words = [(len(re.findall(r"\S*[A-Za-z]\S*", s)), s) for s in sentences]
    long = [f"{path}: {n} words: {s}" for n, s in words if n > LONGEST]
    return long + [f"{path}: inverted: {s}" for s in sentences if INVERTED.match(s)]


def test_sentences_are_short_and_straight():
    wrong = [line for file in texts("*.py", "*.md").items() for line in tangled(*file)]
    assert not wrong, "\n".join(sorted(wrong))


def test_a_tangled_sentence_is_seen():
    long = "word " * 36
    assert len(tangled("a.md", f"# A\n\n{long}end. Short.\n\n    {long}\n\n| {long} |")) == 1
    assert not tangled("a.md", f"{'word ' * 20}end; {'word ' * 20}end.")
    program = f'"""First.\n\n{long}\n"""\n# {long}\nx = 1  # Of a line, its end.'
    assert len(tangled("a.py", program)) == 3
    assert not tangled("a.py", f'"""First.\n\nExamples:\n  >>> x = "{long}"\n"""')
    assert tangled("a.md", "Of the rows that are left one is kept.") != []
    assert not tangled("a.md", "Often, of all rows one is kept.")
