"""A report is one well-formed file that loads nothing, and shows the tables as they are."""

import base64
import doctest
import html.parser
import json
import struct
import sys
import zlib

import pytest
from absl import flags

from experiments import html_parts, html_report
from experiments.html_parts import Code, Files, Heading, Picture, Table, Text

VOID = {"meta", "img", "br", "hr", "link", "input"}
TABLE = """\
| order   | best lr     | train loss          | note       |
| ------- | ----------- | ------------------- | ---------- |
| D-RR    | 0.25 (edge) | 8.20e-02 ± 9.88e-03 | a \\| b     |
| CD-GraB | 0.5         | -                   | **better** |
"""


class Page(html.parser.HTMLParser):
    """What is in a page; raises where a tag is closed that is not open."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.tables, self.text = [], [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append(("", dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, tag

    def handle_data(self, data):
        self.text.append((self.open[-1] if self.open else None, data))
        if "td" in self.open or "th" in self.open:
            cell, attributes = self.tables[-1][-1].pop()
            self.tables[-1][-1].append((cell + data, attributes))

    def inside(self, tag):
        return "".join(text for name, text in self.text if name == tag)

    def cells(self):
        return [[[cell for cell, _ in row] for row in table] for table in self.tables]


def png(width, height):
    """The smallest honest PNG: black, 8 bit grey."""

    def chunk(kind, data):
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    rows = zlib.compress((b"\0" + b"\0" * width) * height)
    return html_parts.PNG + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def written(tmp_path, *sections, title="a title", command=None, versions=()):
    path = tmp_path / "page.html"
    html_report.write(
        str(path), title=title, sections=sections, command=command, versions=dict(versions)
    )
    return path.read_text(encoding="utf-8")


def folder_of(tmp_path, *, table=TABLE, settings=None, pictures=("comparison.png",)):
    (tmp_path / "table.md").write_text(table, encoding="utf-8")
    for i, name in enumerate(pictures):
        (tmp_path / name).write_bytes(png(3 + i, 2))
    settings = settings or {"task": "digits", "recipe": {"workers": 4, "rates": [0.1, 0.2]}}
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    (tmp_path / "versions.json").write_text(json.dumps({"jax": "0.10.2", "torch": None}))
    (tmp_path / "metrics.csv").write_text("step\n1\n")
    return str(tmp_path)


def report_of(folder, **options):
    with open(html_report.of_folder(folder, **options), encoding="utf-8") as file:
        return file.read()


def resources(page):
    """Everything that a browser would fetch."""
    names = ("src", "srcset", "data", "poster", "background", "xlink:href")
    found = [a[n] for _, a in page.attributes for n in names if n in a]
    return found + [a["href"] for tag, a in page.attributes if tag in ("link", "base", "image")]


def test_the_report_of_a_folder_is_well_formed_and_loads_nothing(tmp_path):
    text = report_of(folder_of(tmp_path, pictures=("comparison.png", "curves_R2.png")))
    page = Page(text)
    assert text.startswith("<!DOCTYPE html>")
    assert not {"script", "iframe", "link", "object", "embed"} & set(page.tags)
    assert "//" not in text.replace(page.inside("style"), "") and "url(" not in text
    assert all(found.startswith("data:image/png;base64,") for found in resources(page))
    assert "@import" not in text and "prefers-color-scheme: dark" in text
    assert page.inside("h1") == "digits, 4 workers" == page.inside("title")
    assert "jax 0.10.2" in text and "torch" not in text


def test_every_picture_is_inside_with_its_size_and_in_its_order(tmp_path):
    names = ("curves_R16.png", "curves_R2.png", "time_to_target.png")
    page = Page(report_of(folder_of(tmp_path, pictures=names)))
    images = [a for tag, a in page.attributes if tag == "img"]
    data = [base64.b64decode(a["src"].split(",")[1], validate=True) for a in images]
    assert data == [(tmp_path / names[i]).read_bytes() for i in (2, 1, 0)]
    for a, picture in zip(images, data, strict=True):
        assert struct.unpack(">II", picture[16:24]) == (int(a["width"]), int(a["height"]))
        start, rest = picture.split(b"IDAT")
        assert zlib.decompress(rest) == b"\0" * (int(a["width"]) + 1) * int(a["height"])
        assert "digits, 4 workers" in a["alt"]
    assert len({a["alt"] for a in images}) == 3


def test_tables_have_the_cells_of_the_markdown(tmp_path):
    page = Page(report_of(folder_of(tmp_path, table=f"{TABLE}\nR = 2\n\n{TABLE}\nOne diverged.\n")))
    cells = [
        ["order", "best lr", "train loss", "note"],
        ["D-RR", "0.25 (edge)", "8.20e-02 ± 9.88e-03", "a | b"],
        ["CD-GraB", "0.5", "-", "better"],
    ]
    assert page.cells() == [cells, cells]
    assert page.inside("h3") == "R = 2" and "One diverged." in page.inside("p")
    assert page.inside("strong") == "better" * 2


def test_columns_of_numbers_are_right_aligned_and_rows_have_heads(tmp_path):
    (table,) = Page(written(tmp_path, Table(TABLE))).tables
    for row in table:
        assert ["number" in a.get("class", "") for _, a in row] == [False, True, True, False]
    assert [a.get("scope") for _, a in table[0]] == ["col"] * 4
    assert [a.get("scope") for _, a in table[1]] == ["row", None, None, None]


@pytest.mark.parametrize(
    "column, number",
    [
        (["1.5", "-"], True),
        (["+0.32 ± 0.57", "-0.16 ± 0.41"], True),
        (["2 of 5 arrive", "120 ± 3", "diverged"], True),
        (["-", ""], True),
        ([".5", "inf", "1e-3"], True),
        (["information", "infinite", "nano"], False),
        (["all diverge", "none", "0.5"], False),
        (["D-RR", "-rr"], False),
    ],
)
def test_a_column_is_of_numbers_when_most_of_it_is(column, number):
    text = "| a | b |\n| - | - |\n" + "\n".join(f"| x | {cell} |" for cell in column)
    assert ('class="number">b<' in html_parts.to_html(Table(text))) == number


def test_colons_in_the_line_of_dashes_decide_the_alignment():
    text = html_parts.to_html(Table("| a | b |\n| --: | :-- |\n| x | 1 |"))
    assert 'class="number">a<' in text and 'class="number">b<' not in text


def test_whatever_is_shown_is_escaped(tmp_path):
    evil = '<script>alert("1")</script>&amp;\''
    picture = tmp_path / "p.png"
    picture.write_bytes(png(1, 1))
    sections = (
        Heading(evil), Text(f"{evil} `{evil}` **{evil}**"), Code(evil), Files([evil[:8]]),
        Table(f"| {evil} | `{evil}` |\n| --- | --- |\n| {evil} | **{evil}** |"),
        Picture(str(picture), evil, evil),
    )  # fmt: skip
    text = written(
        tmp_path, *sections, title=evil, command=evil, versions={evil: evil, "x": "<script>"}
    )
    page = Page(text)
    assert "<script" not in text and "script" not in page.tags
    assert page.inside("h1") == page.inside("title") == evil
    assert page.cells() == [[[evil, evil], [evil, evil]]]
    assert [a["alt"] for tag, a in page.attributes if tag == "img"] == [evil]
    assert set(dict(page.attributes)["img"]) == {"alt", "width", "height", "src"}


def test_text_of_code_is_unchanged_whatever_its_hyphens(tmp_path):
    command = "python -m experiments.qsr --data_dir='my dir' \\\n    --rates=1e-3,1e-2  -v - --"
    page = Page(written(tmp_path, Code(command)))
    assert "".join(t for tag, t in page.text if tag in ("code", "span")) == command


def test_links_lead_to_files_beside_the_report_alone(tmp_path):
    names = ["metrics.csv", "a b&c.json", "javascript:x.md"]
    page = Page(written(tmp_path, Files([f"/some/where/{name}" for name in names])))
    found = [a["href"] for tag, a in page.attributes if tag == "a"]
    assert found == ["./metrics.csv", "./a%20b%26c.json", "./javascript%3Ax.md"]
    assert "metrics.csv" in Page(report_of(folder_of(tmp_path))).inside("a")


def test_the_command_is_that_of_the_folder_or_the_caller(tmp_path):
    folder = folder_of(tmp_path)
    assert "Command" not in report_of(folder)
    (tmp_path / "command.txt").write_text("python -m experiments.cd_grab\n")
    assert "experiments.cd_grab" in report_of(folder)
    text = report_of(folder, command="another one", title="my title")
    assert "another one" in text and "experiments.cd_grab" not in text
    assert Page(text).inside("h1") == "my title"


def test_settings_are_lines_of_code(tmp_path):
    page = Page(report_of(folder_of(tmp_path)))
    assert 'task = "digits"\nrecipe.workers = 4\nrecipe.rates = [0.1, 0.2]' in page.inside("code")


def test_the_title_names_task_and_workers_of_every_experiment():
    assert html_report.title_of({"task": "sst2", "recipe": {"workers": 16}}) == "sst2, 16 workers"
    assert html_report.title_of({"recipe": "mnist", "workers": 4}) == "mnist, 4 workers"
    assert html_report.title_of({"recipe": "mnist"}) == "mnist"
    assert html_report.title_of({}) is None


def test_markdown_is_parsed_into_its_parts():
    text = (
        "# One\nnot a head\n\nA sentence.\n" + TABLE + "```sh\n| x\n\n# y\n```\n```\nz\n```\nend\n"
    )
    assert html_parts.parse(text) == [
        Heading("One", 2),
        Text("not a head"),
        Text("A sentence."),
        Table(TABLE.strip()),
        Code("| x\n\n# y"),
        Code("z"),
        Text("end"),
    ]


def test_what_cannot_be_shown_is_refused(tmp_path):
    (tmp_path / "x.png").write_bytes(b"GIF89a" + bytes(40))
    with pytest.raises(ValueError, match="no PNG"):
        html_parts.to_html(Picture(str(tmp_path / "x.png"), "x"))
    with pytest.raises(ValueError, match="as many cells"):
        html_parts.to_html(Table("| a | b |\n| - | - |\n| 1 |"))
    with pytest.raises(ValueError, match="2, 3 or 4"):
        html_parts.to_html(Heading("x", 1))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="neither table"):
        html_report.of_folder(str(tmp_path / "empty"))
    assert not (tmp_path / "empty" / "report.html").exists()


def test_the_entrypoint_writes_the_report(tmp_path, monkeypatch, capsys):
    values = flags.FlagValues()
    html_report.define_flags(values)
    values(["html_report", f"--folder={folder_of(tmp_path)}", "--title=mine"])
    monkeypatch.setattr(html_report, "FLAGS", values)
    html_report.main([])
    assert str(tmp_path / "report.html") in capsys.readouterr().out
    assert Page((tmp_path / "report.html").read_text("utf-8")).inside("h1") == "mine"


def test_the_command_line_can_be_typed_again(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/some/where/qsr.py", "--data_dir=my dir", "--seeds=2"])
    main = type(sys)("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    main.__spec__ = type("Spec", (), {"name": "experiments.qsr"})
    assert html_report.command_line() == "python -m experiments.qsr '--data_dir=my dir' --seeds=2"


@pytest.mark.parametrize("module", (html_parts, html_report))
def test_examples_of_the_docstrings_run(module):
    tried = doctest.testmod(module)
    assert tried.attempted and not tried.failed
