"""The documentation site: what is generated is complete, and the built site needs no network."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from shutil import copyfile, copytree

import pytest
import typer.main
import yaml

import txl_dist
from tests.support.documents import leaf_commands
from txl_dist.cli.app import app
from txl_dist.config.run_config import RunConfig
from txl_dist.config.starting_file import documentation_of
from txl_dist.config.training_config import OPTIMIZER_RECIPES
from txl_dist.model import choices, config

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
LOADED = re.compile(
    r"<(?:script|img|iframe|source)[^>]+src=\"?([^\" >]+)|<link[^>]+href=\"?([^\" >]+)"
)


@pytest.fixture(scope="module", autouse=True)
def kinds_of_the_package() -> Iterator[None]:
    """Without the kind of memory that other tests register."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(config.MEMORY_KINDS, "running_mean", raising=False)
        yield


@pytest.fixture(scope="module")
def references(kinds_of_the_package: None) -> dict[str, str]:
    """Each generated part of the reference by its name."""
    sys.path.insert(0, str(DOCS / "site"))
    import api_reference
    import references

    sys.path.remove(str(DOCS / "site"))
    parts = {name: generate() for name, generate in references.REFERENCES.items()}
    return {"api": api_reference.api_reference(), **parts}


def settings() -> Iterator[str]:
    yield from documentation_of(RunConfig)
    for name, field in RunConfig.model_fields.items():
        if name not in documentation_of(RunConfig):
            assert isinstance(field.annotation, type)
            yield from (f"{name}.{key}" for key in documentation_of(field.annotation))


def test_every_setting_has_its_type_range_default_and_meaning(references: dict[str, str]) -> None:
    page = references["settings"]
    names = [*settings()]
    assert len(names) > 80
    for name in names:
        (entry,) = re.findall(
            rf"### <a .*?></a>`{re.escape(name)}`\n\n(.*?)(?=\n##|\Z)", page, re.S
        )
        facts, _, meaning = entry.partition("\n\n")
        assert re.search(r"^`.+` · .*(default|required)", facts), name
        assert len(meaning.split()) > 2, name
    assert "in [0, 0.99]" in page, "ranges that the model checks itself"
    assert "one of layernorm, rmsnorm" in page


def test_the_ranges_of_settings_are_in_words_and_the_recipes_are_compared(
    references: dict[str, str],
) -> None:
    assert "matches" not in references["settings"]
    assert "begins with `s3://` or `gs://`" in references["settings"]
    rows = references["recipes"].splitlines()[2:]
    sections = (("model", choices.RECIPES), ("optimizer", OPTIMIZER_RECIPES))
    names = [f"{section}.{name}" for section, recipes in sections for name in recipes["modern"]]
    assert [re.findall(r"\[`(.+?)`\]", row) for row in rows] == [[name] for name in names]
    assert "| `false` | `true` |" in rows[names.index("model.qk_norm")]
    assert '| `"adamw"` | `"muon"` |' in rows[names.index("optimizer.name")]


def test_the_api_as_text_has_methods_and_is_the_same_in_every_build(
    references: dict[str, str],
) -> None:
    text = sys.modules["api_reference"].as_text(references["api"])
    assert re.search(r"^Memory\.read\(\n    self,\n    model: TransformerXL,\n", text, re.M)
    assert "at 0x" not in text
    assert max(map(len, text.splitlines())) < 200, "a signature in one line"


def test_every_command_and_option_is_in_the_reference(references: dict[str, str]) -> None:
    page = references["commands"]
    for words, command in leaf_commands(typer.main.get_command(app)).items():
        entry = page.partition(f"</a>txl {words}\n")[2].partition("\n#")[0]
        assert entry, words
        for parameter in command.params:
            if parameter.param_type_name == "option" and not parameter.hidden:
                assert all(f"`{name}" in entry for name in parameter.opts[:1]), (words, parameter)
    assert re.search(r"`--utilisation X` \(default `0.3`, 0.001 to 1\)", page)
    assert re.search(r"`--peak-tflops X` \(default: A100: .*, 1e-06 to 1e\+06\)", page)


def test_every_public_name_is_in_the_reference(references: dict[str, str]) -> None:
    documented = re.findall(r"^::: [\w.]+\.(\w+)$", references["api"], re.MULTILINE)
    assert sorted(documented) == sorted(txl_dist.__all__)


def test_the_pages_in_the_repository_have_what_the_code_says_now(
    references: dict[str, str],
) -> None:
    generator = sys.modules["references"]
    pages = {path: path.read_text("utf-8") for path in generator.pages()}
    parts = re.findall(r"<!-- generated: ([a-z ]+) -->", "".join(pages.values()))
    assert sorted([*parts, "api"]) == sorted(references)
    for path, text in pages.items():
        assert text == generator.filled(text), f"{path}: run python docs/site/references.py"


def test_every_page_is_in_the_navigation() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    in_navigation = set(_pages(config["nav"]))
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    notebooks = {f"notebooks/{path.stem}.md" for path in DOCS.glob("notebooks/*.ipynb")}
    decisions = {page for page in pages if page.startswith("decisions/0")}
    assert in_navigation == pages - decisions | notebooks


def _pages(nav: object) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, list | dict):
        for each in nav.values() if isinstance(nav, dict) else nav:
            yield from _pages(each)


def test_the_messages_of_the_troubleshooting_page_are_those_of_the_program() -> None:
    """Each part of a message between two "..." is in a text of the code."""
    texts = "\n".join(_texts_of_the_code())
    messages = re.findall(r"^### `(.+)`$", (DOCS / "troubleshooting.md").read_text("utf-8"), re.M)
    assert len(messages) > 25
    for message in messages:
        for part in filter(None, (part.strip() for part in message.split("..."))):
            assert part in texts, message


def _texts_of_the_code() -> Iterator[str]:
    """The sources, with literals of several lines joined."""
    for package in ("data_pipeline", "txl_dist", "cluster"):
        for path in (ROOT / package).rglob("*.py"):
            yield re.sub(r"\"\s*\n\s*f?\"", "", path.read_text("utf-8"))


def test_the_picture_of_the_readme_has_the_figures_of_the_experiments() -> None:
    from benchmarks.memory_picture import EXPERIMENTS, PICTURE, picture

    assert PICTURE.read_text("utf-8") == picture(EXPERIMENTS.read_text("utf-8"))


def build(docs: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(out)]
    return subprocess.run(
        command, cwd=docs, check=False, capture_output=True, text=True, timeout=300
    )


@pytest.mark.slow
def test_the_site_is_built_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    result = build(ROOT, tmp_path)
    assert result.returncode == 0, result.stderr
    pages = [path for path in tmp_path.rglob("*.html") if path.name != "404.html"]
    assert len(pages) > 150
    for path in pages:
        assert path.with_suffix(".md").is_file(), "every page is there as Markdown"
        for loaded in LOADED.findall(path.read_text("utf-8")):
            address = "".join(loaded)
            assert not re.match(r"(https?:)?//", address), (path, address)
    for name in ("settings", "commands", "python", "file_formats"):
        text = (tmp_path / "reference" / f"{name}.md").read_text()
        assert "<!-- api" not in text
        assert not re.search("^:::", text, re.MULTILINE)
    listed = re.findall(r"\]\(([\w/.]+)\)", (tmp_path / "llms.txt").read_text())
    assert len(listed) > 40
    for path in DOCS.glob("notebooks/*.ipynb"):
        page = tmp_path / "notebooks" / f"{path.stem}.md"
        assert page.relative_to(tmp_path).as_posix() in listed
        assert f"]({path.name})" in page.read_text()
        assert (tmp_path / "notebooks" / path.name).is_file()
    assert all((tmp_path / name).is_file() for name in listed)


@pytest.mark.slow
def test_broken_links_and_anchors_fail_and_are_named(tmp_path: Path) -> None:
    broken = (
        "[a page](no_such_page.md)",
        "[a section](glossary.md#no-such-section)",
        "[a file](../txl_dist/no_such_file.py)",
        "[a generated section](reference/settings.md#model.no_such_setting)",
    )
    for name in ("txl_dist", "data_pipeline", "cluster", "tests", "benchmarks"):
        (tmp_path / name).symlink_to(ROOT / name)
    copyfile(ROOT / "mkdocs.yml", tmp_path / "mkdocs.yml")
    copytree(DOCS, tmp_path / "docs")
    with (tmp_path / "docs" / "faq.md").open("a") as page:
        page.writelines(f"\n{link}\n" for link in broken)
    result = build(tmp_path, tmp_path / "site")
    assert result.returncode != 0
    for link in broken:
        name = re.split("[/#]", link.rstrip(")"))[-1].removeprefix("[a page](")
        assert name in result.stderr + result.stdout
