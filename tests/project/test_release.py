"""What a release says: one address, one version, and a README for the package index."""

import configparser
import email
import re
import shutil

import pytest
import yaml

import syncopate
from tests.installed import ROOT, module_of

address = module_of(ROOT / "docs" / "address.py")
PLACE = "https://github.com/one/syncopate"
FILES = [*address.WRITERS, *(f"notebooks/{p.name}" for p in ROOT.glob("notebooks/*.ipynb"))]


@pytest.fixture
def clone(tmp_path):
    """What has the address, in a folder: there it can be changed."""
    for name in ("docs/address.ini", *FILES):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def move(clone, repository, site=""):
    path = clone / "docs" / "address.ini"
    lines = re.sub(r"(?m)^(repository|site) =.*", r"\1 =", path.read_text())
    lines = lines.replace("repository =", f"repository = {repository}")
    path.write_text(lines.replace("site =", f"site = {site}"))
    address.write(clone)
    return {name: (clone / name).read_text() for name in FILES}


def test_every_file_has_the_address_of_the_one_file(clone):
    before = {name: (clone / name).read_text() for name in FILES}
    address.write(clone)
    assert before == {name: (clone / name).read_text() for name in FILES}


def test_an_address_is_written_everywhere_and_leaves_nothing_behind(clone):
    plain = move(clone, "")
    assert not [name for name in FILES if "github.com" in plain[name] or "[![" in plain[name]]
    move(clone, "https://github.com/first-owner/name/", "https://name.readthedocs.io/")
    written = move(clone, f"{PLACE}.git")
    assert not [
        name for name in FILES if "first-" in written[name] or "readthedocs" in written[name]
    ]
    site = "https://one.github.io/syncopate/"

    setup = configparser.ConfigParser()
    setup.read_string(written["setup.cfg"])
    links = dict(re.findall(r"^(\w+) = (\S+)$", setup["metadata"]["project_urls"], re.M))
    assert {*links} == {"Documentation", "Source", "Issues", "Changelog"}
    assert links["Source"] == PLACE and links["Documentation"] == site
    citation = yaml.safe_load(written["CITATION.cff"])
    assert (citation["repository-code"], citation["url"]) == (PLACE, site)
    lines = re.findall(r"^(site_url|repo_url|edit_uri): (.*)$", written["mkdocs.yml"], re.M)
    assert lines == [("site_url", site), ("repo_url", PLACE), ("edit_uri", "edit/main/docs/")]
    badges = re.findall(r"^\[!\[(\w+)\]\(https://\S+?\)\]\((\S+)\)$", written["README.md"], re.M)
    assert [name for name, _ in badges] == ["CI", "Package", "Python", "Documentation", "Licence"]
    assert badges[1][1] == f"https://pypi.org/project/{syncopate.DISTRIBUTION}/"
    for name in FILES[len(address.WRITERS) :]:
        opens = f"colab.research.google.com/github/one/syncopate/blob/main/{name})"
        assert written[name].count(opens) == written[name].count(f'\\"git+{PLACE}\\"') == 1

    assert move(clone, "") == plain
    with pytest.raises(ValueError, match="repository is 'example.org/x' in docs/address.ini"):
        move(clone, "example.org/x")


def relative(readme):
    text = re.sub(r"^```.*?^```$", "", readme, flags=re.M | re.S)
    targets = re.findall(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"", text)
    return [a or b for a, b in targets if not (a or b).startswith(("https:", "#"))]


def test_the_readme_of_a_package_leads_to_files_of_its_version(clone):
    text = (ROOT / "README.md").read_text()
    assert len(relative(text)) > 5, "a relative link would be found"
    move(clone, PLACE)
    address.write_package(clone, clone)
    readme = (clone / "README.md").read_text()
    assert not relative(readme)
    links = re.findall(rf"\]\({PLACE}/blob/v{syncopate.__version__}/([^)#]+)", readme)
    raw = rf"https://raw.githubusercontent.com/one/syncopate/v{syncopate.__version__}/([^)\"]+)"
    pictures = re.findall(raw, readme)
    assert len(links) > 5 and pictures and all((ROOT / p).is_file() for p in links + pictures)
    programs = re.compile(r"^```(?:python|diff)\n.*?^```$", re.M | re.S)
    assert programs.findall(readme) == programs.findall(text) != []
    typed = re.findall(r"pip install (.*?)(?:`|$)", readme, re.M)
    assert typed.pop() == '-e ".[test]" && pytest'  # in a clone
    assert typed and all(re.match(rf'"?{syncopate.DISTRIBUTION}\b', line) for line in typed)


def test_a_wheel_has_no_relative_link_and_names_no_address_that_is_not_there(unpacked):
    (info,) = unpacked.glob("*.dist-info")
    metadata = email.message_from_string((info / "METADATA").read_text())
    readme = metadata.get_payload()
    assert metadata["Name"] == syncopate.DISTRIBUTION and len(readme) > 2000
    assert not relative(readme)
    project = address.read(ROOT)
    assert bool(metadata.get_all("Project-URL")) == ("<img" in readme) == bool(project)


def test_the_version_is_one_and_has_a_date():
    changes = (ROOT / "CHANGELOG.md").read_text()
    version, date = re.findall(r"^## (\d\S+) - (\d{4}-\d\d-\d\d)$", changes, re.M)[0]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert version == citation["version"] == syncopate.__version__
    assert date == str(citation["date-released"])
