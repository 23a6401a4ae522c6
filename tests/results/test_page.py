"""The page of a folder: what is in it, and what is escaped."""

import doctest
import json
import sys
from html.parser import HTMLParser

import pytest

from experiments.results import records, report, rule, verdict_page

EVIL = "<script>alert(1)</script>&'"


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


def test_whatever_is_shown_is_escaped_and_inside(tmp_path, monkeypatch):
    from PIL import Image

    (tmp_path / "table.md").write_text(f"{EVIL}\n\n| a | b |\n| - | - |\n| {EVIL} | `{EVIL}` |\n")
    (tmp_path / "settings.json").write_text(json.dumps({"x": EVIL}))
    Image.new("RGB", (3, 2)).save(tmp_path / "comparison R2.png")
    main = type(sys)("__main__")
    main.__spec__ = type("Spec", (), {"name": "experiments.qsr"})
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "argv", ["/some/where/qsr.py", "--data_dir=my dir", "--seeds=2"])
    report.write_page(str(tmp_path), EVIL)
    text = (tmp_path / "report.html").read_text()
    shown = Page(text)
    assert shown.text["h1"] == shown.text["title"] == EVIL
    assert EVIL in shown.text["td"] and EVIL in shown.text["pre"]
    assert shown.text["pre"].endswith("python -m experiments.qsr '--data_dir=my dir' --seeds=2")
    images = [dict(a)["src"] for tag, a in shown.tags if tag == "img"]
    assert len(images) == 1 and images[0].startswith("data:image/png;base64,")
    assert not {"script", "iframe"} & {tag for tag, _ in shown.tags}
    assert "http" not in text.replace("http-equiv", "")  # nothing is loaded


@pytest.mark.parametrize("module", (records, rule, verdict_page))
def test_examples_of_the_docstrings_run(module):
    assert not doctest.testmod(module).failed
