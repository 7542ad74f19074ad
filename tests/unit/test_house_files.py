"""Files of the repository: sizes, names, docstrings, README tree, version, decision index and links."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
LINES_MAX = 400
TEST_LINES_MAX = 700
BYTES_MAX = 300 * 1024
# The demo model's weights and its vocabulary, screenshots, and a line of text for each kernel and configuration.
LARGE_ALLOWED = ("engine/demo/", "docs/images/", "bench/results/compiled_kernels.jsonl", "bench/results/engine_peers.jsonl")
MEANINGLESS_NAMES = {"utils", "util", "helpers", "helper", "manager", "common", "misc", "v2"}
# Spelled in two parts, so that this file does not hold what it forbids.
UNFINISHED = re.compile("TO" + "DO|FIX" + "ME|XX" + "X|raise NotImplemented" + "Error")
DEVELOPMENT_PATH = "/wo" + "rk/"


def tracked() -> list[str]:
    answer = subprocess.run(["git", "ls-files"], cwd=REPO, capture_output=True, text=True, check=True)
    return [name for name in answer.stdout.splitlines() if (REPO / name).is_file()]


def sources(*suffixes: str) -> list[str]:
    return [name for name in tracked() if name.endswith(suffixes) and not name.startswith("web/static/vendor/")]


def test_no_file_is_too_long() -> None:
    lengths = {name: len((REPO / name).read_text("utf-8").splitlines()) for name in sources(".py", ".css", ".js", ".html")}
    long = {
        name: lines for name, lines in lengths.items() if lines > (TEST_LINES_MAX if name.startswith("tests/") else LINES_MAX)
    }
    assert not long


def test_no_module_has_a_meaningless_name() -> None:
    assert not [name for name in sources(".py") if Path(name).stem in MEANINGLESS_NAMES]


def test_every_module_has_a_docstring() -> None:
    silent = [name for name in sources(".py") if not re.match(r'(#.*\n)*"""\S', (REPO / name).read_text("utf-8") or '"""x')]
    assert not silent


MAPPED = [
    "engine/runner", "engine/sampling", "engine/scheduling", "kernels", "kernels/simd", "kernels/triton",
    "kernels/triton/attention", "kernels/triton/experts", "kernels/triton/invariant", "kernels/triton/launching",
    "kernels/triton/products", "kernels/triton/rows", "kernels/triton/sampling", "kernels/triton/step",
]  # fmt: skip


@pytest.mark.parametrize("package", MAPPED)
def test_the_docstring_of_a_large_package_names_every_module(package: str) -> None:
    text = (REPO / package / "__init__.py").read_text("utf-8")
    modules = {path.stem for path in (REPO / package).glob("*.py")} - {"__init__"}
    packages = {path.parent.name for path in (REPO / package).glob("*/__init__.py")}
    assert (modules | packages) - {*re.findall(r"\w+", text)} == set()


def test_no_file_is_marked_as_unfinished() -> None:
    found = [name for name in sources(".py", ".js", ".css", ".html") if UNFINISHED.search((REPO / name).read_text("utf-8"))]
    assert not found


def test_no_file_names_a_path_of_the_development_machine() -> None:
    texts = sources(".py", ".js", ".css", ".html", ".md", ".toml", ".txt", ".yaml", ".json", "run")
    assert not [name for name in texts if DEVELOPMENT_PATH in (REPO / name).read_text("utf-8")]


def test_only_listed_files_are_large() -> None:
    large = {name: (REPO / name).stat().st_size for name in tracked() if (REPO / name).stat().st_size > BYTES_MAX}
    assert not [name for name in large if not name.startswith(LARGE_ALLOWED)]


def test_the_tree_in_the_readme_lists_every_folder() -> None:
    readme = (REPO / "README.md").read_text("utf-8")
    match = re.search(r"^## The tree\n.*?```\w*\n(.*?)```", readme, re.DOTALL | re.MULTILINE)
    assert match, "README.md has no tree under the heading `## The tree`"
    written = {line.split("/")[0] for line in match[1].splitlines() if re.match(r"[\w.]+/ +\S", line)}
    assert written == {name.split("/")[0] for name in tracked() if "/" in name and not name.startswith(".")}


def test_the_version_is_the_newest_in_the_changelog() -> None:
    version = tomllib.loads((REPO / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    newest = re.search(r"^## (\S+)", (REPO / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert newest
    assert newest[1] == version


def test_the_index_of_decisions_lists_every_decision_by_title() -> None:
    folder = REPO / "docs/adr"
    index = (folder / "README.md").read_text("utf-8")
    entries = {}
    for decision in folder.glob("0*.md"):
        number, title = decision.read_text("utf-8").splitlines()[0].removeprefix("# ").split(". ", 1)
        assert int(number) == int(decision.name[:4])
        entries[decision.name] = f"- {number}. [{title}]({decision.name})\n"
    assert not [name for name, entry in entries.items() if entry not in index]
    assert index.count("](0") == len(entries)


def test_the_methods_named_in_the_architecture_exist() -> None:
    named = {*re.findall(r"`([A-Z]\w*)\.(\w+)`", (REPO / "docs/architecture.md").read_text("utf-8"))}
    texts = [(REPO / name).read_text("utf-8") for name in sources(".py") if name.startswith(("engine/", "appliance/"))]
    classes = {owner: [text.partition(f"\nclass {owner}")[2] for text in texts] for owner, _ in named}
    missing = [
        f"{owner}.{method}"
        for owner, method in sorted(named)
        if not any(re.search(rf"(def |self\.){method}\b", text) for text in classes[owner])
    ]
    assert named
    assert not missing


def test_links_between_documents_are_valid() -> None:
    broken = []
    for name in sources(".md"):
        for link in re.findall(r"\]\(([^)#\s:]+)(?:#[^)]*)?\)", (REPO / name).read_text("utf-8")):
            if not (REPO / name).parent.joinpath(link).exists():
                broken.append((name, link))
    assert not broken


def test_links_between_documents_lead_to_sections() -> None:
    broken = []
    for name in sources(".md"):
        for link, anchor in re.findall(r"\]\(([^)#\s:]*)#([^)]+)\)", (REPO / name).read_text("utf-8")):
            target = (REPO / name).parent / link if link else REPO / name
            headings = re.findall(r"^#+ (.+)$", target.read_text("utf-8"), re.MULTILINE) if target.suffix == ".md" else []
            anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            if headings and anchor not in anchors:
                broken.append((name, link, anchor))
    assert not broken
