"""The content of report.html, and its escaping."""

import html
import json
import re
import sys
import types

from PIL import Image

from experiments.results import page
from experiments.results.tables import markdown

EVIL = "<script>alert(1)</script>&"


def test_the_report_escapes_and_embeds_its_content(tmp_path, monkeypatch):
    (tmp_path / "table.md").write_text(f"{EVIL}\n\n| a | b |\n| - | - |\n| {EVIL} | `{EVIL}` |\n")
    (tmp_path / "settings.json").write_text(json.dumps({"x": EVIL}))
    Image.new("RGB", (3, 2)).save(tmp_path / "comparison R2.png")
    main = types.SimpleNamespace(__spec__=types.SimpleNamespace(name="experiments.qsr"))
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "argv", ["/some/where/qsr.py", "--data_dir=my dir", f"--x={EVIL}"])
    (tmp_path / "table_old.md").write_text("of an earlier call")
    Image.new("RGB", (3, 2)).save(tmp_path / "old.png")
    texts = {f"table{EVIL}.md": (tmp_path / "table.md").read_text()}
    page.write_page(str(tmp_path), EVIL, pictures=["comparison R2.png"], texts=texts)
    text = (tmp_path / "report.html").read_text()
    # Title and heading, the table's four, settings and command.
    assert text.count(html.escape(EVIL)) == 8 and "<script" not in text
    assert "of an earlier call" not in text and "old.png" not in text
    assert html.escape("python -m experiments.qsr '--data_dir=my dir' '--x=") in text
    assert text.count("<td>") == 2 and text.count('src="data:image/png;base64,') == 1
    assert "http" not in text.replace("http-equiv", "")  # nothing is loaded


LABELS = [
    "<img src=x onerror=alert(1)>", "![x](http://evil.example/x.png)", "[x](http://evil.example)",
    "<http://evil.example>", "![x](data:image/png;base64,AAAA)", "`code`", "a & b", "&lt;b&gt;",
    "a | b", "two\nlines", "",
]  # fmt: skip


def test_markup_in_labels_stands_as_it_is(tmp_path):
    """Nothing in a cell, a text or a name becomes a picture, a link or a tag."""
    rows = [{"arm": label, label: 1} for label in LABELS[:1]] + [{"arm": x, "": 1} for x in LABELS]
    texts = {f"table_{label}.md": f"{label}\n\n{markdown([row])}"
             for label, row in zip([*LABELS, "last"], rows, strict=True)}  # fmt: skip
    page.write_page(str(tmp_path), LABELS[0], pictures=[], texts=texts)
    whole = (tmp_path / "report.html").read_text()
    body = whole.split("<body>")[1]
    found = set(re.findall(r"<(\w+)", body))
    assert found == {"h1", "h2", "h3", "p", "table", "thead", "tbody", "tr", "th", "td", "pre"}
    assert all(body.count(html.escape(label, quote=False)) >= 2 for label in LABELS[1:5])
    assert body.count("<td>a | b</td>") == body.count("<td>two lines</td>") == 1
