"""README.md and docs/: what they quote, link to and name is there, and is as they say."""

import re
import shlex

import pytest
from conftest import REPOSITORY

from poptransformer.checkpoint.fetch import SHIPPED
from poptransformer.config import check_overrides
from poptransformer.models import MODELS

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
GUIDE = REPOSITORY / "docs" / "adding_a_model.md"
TOPS = ("benchmarks", "configs", "custom_ops", "docs", "examples", "poptransformer", "tests")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def prose(page):
    """A page's text without its code blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def code_blocks(page):
    """(language, code, the last link in the paragraph above it) of each block."""
    text = page.read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        paragraph = text[: match.start()].rstrip().rpartition("\n\n")[2]
        yield match[1], match[2], (LINK.findall(paragraph) or [None])[-1]


def is_excerpt(code, source):
    """Whether code is whole lines of source, in their order; `...` stands for lines left out."""
    at = 0
    for piece in re.split(r"^\.\.\.\n", code, flags=re.MULTILINE):
        found = f"\n{source}".find(f"\n{piece}", at)
        if not piece.strip() or found < 0:
            return False
        at = found + len(piece)
    return True


def anchors(page):
    """The names under which GitHub links to a page's headings."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_what_counts_as_an_excerpt():
    source = "a = 1\nb = 2\n\nc = 3\nd = 4\n"
    assert is_excerpt("a = 1\nb = 2\n", source) and is_excerpt("b = 2\n\nc = 3\n", source)
    assert is_excerpt("a = 1\n...\nd = 4\n", source) and not is_excerpt("d = 4\n...\na = 1\n", source)
    for wrong in ("b = 3\n", "a = 1\nc = 3\n", " = 1\n", "    a = 1\n", "a =\n", "...\nd = 4\n", ""):
        assert not is_excerpt(wrong, source), wrong


def test_excerpts_are_in_their_files():
    blocks = [(code, link) for language, code, link in code_blocks(GUIDE) if language == "python"]
    assert len(blocks) > 8
    for code, link in blocks:
        assert link, f"no file is named above\n{code}"
        assert is_excerpt(code, (GUIDE.parent / link).read_text(encoding="utf-8")), f"{link} does not have\n{code}"


@each_page
def test_links(page):
    links = [link for link in LINK.findall(prose(page)) if "://" not in link]
    assert links
    for link in links:
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists() and target.is_relative_to(REPOSITORY), link
        assert not anchor or anchor in anchors(target), link


@each_page
def test_file_names(page):
    """What is set as code and begins with one of the project's folders is there; so are files that commands run."""
    names = [name for name in re.findall(r"`([^`\s]+)`", prose(page)) if name.split("/")[0] in TOPS and "/" in name]
    for _, code, _ in code_blocks(page):
        names += re.findall(rf"(?:^|[\s=])((?:{'|'.join(TOPS)})/[\w./-]+)", code)
    assert names
    assert [name for name in names if not (REPOSITORY / name).exists()] == []


def test_names_of_the_guide():
    """Names set as code are those of the source."""
    files = [path for top in TOPS for kind in ("*.py", "*.yaml") for path in (REPOSITORY / top).rglob(kind)]
    texts = (path.read_text(encoding="utf-8") for path in files if path.name != "test_docs.py")
    words = {word for text in texts for word in re.findall(r"\w+", text)}
    names = re.findall(r"`([A-Za-z_][\w.]*)(?:\([^`]*\)|=)?`", prose(GUIDE))
    assert len(names) > 20
    assert [name for name in names if not set(name.split(".")) <= words] == []


@each_page
def test_commands_of_examples(page):
    """Scripts, configs and keys of the commands exist."""
    commands = [line for _, code, _ in code_blocks(page) for line in code.splitlines() if line.startswith("python examples/")]
    assert commands
    for command in commands:
        _, script, *arguments = shlex.split(command)
        config = "sharding"
        for argument in arguments:
            if argument.startswith("--"):
                option, _, config = argument.partition("=")
                assert option == "--config-name", command
        assert (REPOSITORY / script).is_file(), command
        assert (REPOSITORY / "configs" / script.split("/")[1] / f"{config}.yaml").is_file(), command
        check_overrides(arguments)


def test_fetched_models_of_the_readme():
    names = re.findall(r"poptransformer\.checkpoint\.fetch (\w+)", PAGES[0].read_text(encoding="utf-8"))
    assert names and set(names) <= set(SHIPPED)


def test_python_of_the_readme_compiles():
    codes = [code for language, code, _ in code_blocks(PAGES[0]) if language == "python"]
    assert codes
    for code in codes:
        compile(code, "README.md", "exec")


def test_table_of_families():
    """Every model_type has its row, beside the file whose model it runs."""
    section = prose(PAGES[0]).partition("## Families\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| ")][1:]
    in_rows = {name: row for row in rows for name in re.findall(r"`(\w+)`", row[1])}
    assert set(in_rows) == set(MODELS)
    for name, model in MODELS.items():
        if isinstance(model, type):
            assert f"({model.__module__.replace('.', '/')}.py)" in in_rows[name][3], name
