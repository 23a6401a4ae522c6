"""The page of a folder: what is in it, what is escaped, and what is refused."""

import doctest
import json
import sys
from html.parser import HTMLParser

import pytest

from experiments.results import page, records, rule, verdict_page

EVIL = "<script>alert(1)</script>&amp;'"
TABLE = "| arm | lr | note |\n| --- | -- | ---- |\n| D-RR | 0.25 (edge) | 2 |\n| QSR | - | good |\n"


class Page(HTMLParser):
    """Tags with their attributes, and the text inside of every one."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.text = [], [], {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, "tags are balanced"

    def handle_data(self, data):
        if self.open:
            self.text[self.open[-1]] = self.text.get(self.open[-1], "") + data


def folder_of(path, *, table=TABLE, settings=None):
    from PIL import Image

    (path / "table.md").write_text(table)
    (path / "settings.json").write_text(json.dumps(settings or {"task": "digits"}))
    (path / "versions.json").write_text('{"jax": "1.2", "flax": null}')
    Image.new("RGB", (3, 2)).save(path / "comparison R2.png")
    return str(path)


def page_of(folder, **options):
    with open(page.of_folder(folder, **{"title": "t"} | options), encoding="utf-8") as file:
        return file.read()


def test_a_page_holds_tables_pictures_settings_and_command(tmp_path):
    text = page_of(folder_of(tmp_path), title="my title", command="python -m x --y='a b'")
    shown = Page(text)
    assert shown.text["h1"] == shown.text["title"] == "my title"
    images = [a for tag, a in shown.tags if tag == "img"]
    assert [(a["width"], a["height"]) for a in images] == [("3", "2")]
    assert images[0]["src"].startswith("data:image/png;base64,")
    assert 'task = "digits"' in shown.text["code"] and "--y='a b'" in shown.text["code"]
    assert "Made with jax 1.2." in shown.text["p"]
    assert "http" not in text.replace("http-equiv", "")  # nothing is loaded


def test_columns_of_numbers_stand_to_the_right(tmp_path):
    shown = Page(page_of(folder_of(tmp_path)))
    classes = [a.get("class") for tag, a in shown.tags if tag in ("th", "td")]
    assert classes == [None, "number", None] * 3


def test_whatever_is_shown_is_escaped(tmp_path):
    table = f"{EVIL}\n\n| a | b |\n| - | - |\n| {EVIL} | `{EVIL}` **{EVIL}** |\n"
    folder = folder_of(tmp_path, table=table, settings={"x": EVIL, "y": "```\n" + EVIL})
    text = page_of(folder, title=EVIL, command=f"```\n{EVIL}")
    shown = Page(text)
    assert "<script" not in text and shown.text["h1"] == EVIL
    assert not {"script", "iframe"} & {tag for tag, _ in shown.tags}


def test_what_cannot_be_shown_is_refused(tmp_path):
    with pytest.raises(ValueError, match="neither table"):
        page.of_folder(str(tmp_path), title="t")
    (tmp_path / "x.png").write_bytes(b"GIF89a" + bytes(40))
    with pytest.raises(ValueError, match="no PNG"):
        page.of_folder(str(tmp_path), title="t")
    assert not (tmp_path / "report.html").exists()


def test_the_command_line_can_be_typed_again(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/some/where/qsr.py", "--data_dir=my dir", "--seeds=2"])
    main = type(sys)("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    main.__spec__ = type("Spec", (), {"name": "experiments.qsr"})
    assert page.command_line() == "python -m experiments.qsr '--data_dir=my dir' --seeds=2"


@pytest.mark.parametrize("module", (page, records, rule, verdict_page))
def test_examples_of_the_docstrings_run(module):
    assert not doctest.testmod(module).failed
