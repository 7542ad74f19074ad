"""Permitted imports between packages, read from the source."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]

# The pure half of the engine: integers and text, so that a laptop with no torch can test it. The other half holds tensors.
ENGINE_TENSORS = {
    "engine", "build", "resolved_options", "loop", "main", "verify", "device", "weights", "runner", "layers", "models",
    "sampling", "quantization", "grammar.masks", "memory.device", "memory.forecast", "offline.llm", "demo",
}  # fmt: skip
PURE_EXCEPTIONS = {"sampling.randomness"}
PROTOCOL = {"engine.protocol", "engine.transport"}
# From text to token ids and back, the same for the gateway and for an offline script.
TEXT = {"engine.text.chat_template", "engine.text.detokenizer", "engine.text.bad_words", "engine.text.length"}

# area -> what it may import beside itself and the packages of others
ALLOWED: dict[str, set[str]] = {
    "appliance.base": set(),
    "appliance.tenancy": {"appliance.base"},
    "appliance.metering": {"appliance.base", "appliance.tenancy"},
    "appliance.telemetry": {"appliance.base", *PROTOCOL},
    "appliance.serving": {
        "appliance.base", "appliance.tenancy", "appliance.metering", "appliance.telemetry", *PROTOCOL, *TEXT,
    },
    "appliance.api": {
        "appliance.base", "appliance.tenancy", "appliance.metering", "appliance.telemetry", "appliance.serving", *PROTOCOL,
    },
    "appliance.console": {
        "appliance.base", "appliance.tenancy", "appliance.metering", "appliance.telemetry", "appliance.serving", *PROTOCOL,
    },
    "appliance.cli": {"appliance", "engine.simulator", "engine.errors", "engine.triton_toolchain", "engine.visible_gpu"},
    "appliance.app": {"appliance", *PROTOCOL},
    "engine": {"kernels.ops"},
    "kernels": set(),
}  # fmt: skip
OURS = ("appliance", "engine", "kernels", "installer", "migrations", "tests", "bench", "web", "steps")


def modules(*folders: str) -> Iterator[tuple[str, Path]]:
    for folder in folders:
        for path in sorted((REPO / folder).rglob("*.py")):
            name = ".".join(path.relative_to(REPO).with_suffix("").parts)
            yield name.removesuffix(".__init__"), path


@cache
def imports(path: Path) -> list[str]:
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            found += (f"{node.module}.{alias.name}" for alias in node.names)
    return found


def within(name: str, area: str) -> bool:
    return name == area or name.startswith(area + ".")


def is_pure(module: str) -> bool:
    return module in PURE_EXCEPTIONS or not any(within(module, tensors) for tensors in ENGINE_TENSORS)


def area_of(module: str) -> str:
    return max((area for area in ALLOWED if within(module, area)), key=len, default="")


def test_areas_import_only_permitted_areas() -> None:
    wrong = [
        f"{module} imports {name}"
        for module, path in modules("appliance", "engine", "kernels")
        for name in imports(path)
        if name.split(".")[0] in OURS
        and not any(within(name, allowed) for allowed in {area_of(module), *ALLOWED.get(area_of(module), set())} if allowed)
        and name != "appliance"  # the bare package holds nothing but its docstring
    ]
    assert not wrong, "\n".join(wrong)


def test_the_pure_half_of_the_engine_imports_no_tensors() -> None:
    wrong = [
        f"{module} imports {name}"
        for module, path in modules("engine")
        if is_pure(module.removeprefix("engine."))
        for name in imports(path)
        if name.split(".")[0] in {"torch", "numpy", "triton", "kernels"}
    ]
    assert not wrong, "\n".join(wrong)


def part_of(name: str, top: str) -> str:
    """The package below `top`, or the module that is in none."""
    return f"{top}.{name.removeprefix(f'{top}.').split('.')[0]}"


@pytest.mark.parametrize("top", ["engine", "kernels", "kernels.triton"])
def test_packages_have_no_import_cycles(top: str) -> None:
    needed: dict[str, set[str]] = {}
    for module, path in modules(top.replace(".", "/")):
        if module != top:  # the root only re-exports
            part = part_of(module, top)
            found = {part_of(name, top) for name in imports(path) if within(name, top)}
            needed.setdefault(part, set()).update(found - {part})
    try:
        graphlib.TopologicalSorter(needed).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


@cache
def top_level_names(path: Path) -> set[str]:
    """Return the names that a module defines or imports, on any branch."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found.update(alias.asname or alias.name for alias in node.names)
    return found


def test_modules_of_limits_import_only_earlier_ones_of_the_documented_order() -> None:
    package = "appliance.metering.limits"
    paths = {name.removeprefix(f"{package}."): path for name, path in modules(package.replace(".", "/")) if name != package}
    order = ast.get_docstring(ast.parse((REPO / package.replace(".", "/") / "__init__.py").read_text("utf-8"))) or ""
    rows = [row.split(":")[0].split(", ") for row in order.partition("Read them in this order.")[2].splitlines()[2:]]
    line_of = {name.strip(): number for number, row in enumerate(rows) for name in row}
    assert line_of.keys() == paths.keys()
    for name, path in paths.items():
        needed = [each.removeprefix(f"{package}.").split(".")[0] for each in imports(path) if within(each, package)]
        assert [each for each in needed if line_of[each] > line_of[name]] == [], f"what {name} imports comes after it"


def test_benches_import_only_existing_names() -> None:
    """CI neither type-checks nor runs all benches."""
    paths = dict(modules(*OURS))

    def exists(name: str) -> bool:
        module, _, defined = name.rpartition(".")
        return name in paths or (module in paths and defined in top_level_names(paths[module]))

    wrong = [
        f"{module} imports {name}"
        for module, path in modules("bench")
        for name in imports(path)
        if name.split(".")[0] in OURS and not exists(name)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_test_module_imports_another() -> None:
    """What several need is in tests/support."""
    found = [
        f"{module} imports {name}"
        for module, path in modules("tests")
        for name in imports(path)
        if within(name, "tests") and any(part.startswith("test_") for part in name.split(".")[:-1])
    ]
    assert not found, "\n".join(found)


def test_reference_kernels_import_no_implementation() -> None:
    wrong = [
        f"{module} imports {name}"
        for module, path in modules("kernels/reference")
        for name in imports(path)
        if name.startswith(("kernels.torch", "kernels.simd", "kernels.triton", "triton"))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("part", ["kernels.triton.gate", "kernels.reference"])
def test_serving_code_imports_no_test_support_of_kernels(part: str) -> None:
    wrong = [
        f"{module} imports {name}"
        for module, path in modules("engine", "kernels")
        if not within(module, part)
        for name in imports(path)
        if within(name, part)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_appliance_imports_no_tensor_library() -> None:
    wrong = [
        f"{module} imports {name}"
        for module, path in modules("appliance", "migrations")
        for name in imports(path)
        if name.split(".")[0] in {"torch", "triton", "transformers", "kernels"}
    ]
    assert not wrong, "\n".join(wrong)


def test_the_installer_imports_only_the_standard_library() -> None:
    wrong = [
        f"{module} imports {name}"
        for module, path in modules("installer")
        for name in imports(path)
        if name.split(".")[0] not in {*sys.stdlib_module_names, "steps"}
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("start", ["appliance.cli.main", "appliance.app", *sorted(PROTOCOL), *sorted(TEXT)])
def test_importing_the_gateway_loads_no_tensor_library(start: str) -> None:
    program = f"import sys, {start}; print(sorted({{'torch', 'triton', 'transformers'}} & set(sys.modules)))"
    answer = subprocess.run([sys.executable, "-c", program], cwd=REPO, capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def test_our_kernels_package_is_not_taken_for_that_of_transformers() -> None:
    # transformers looks for a package `kernels` of its own; ours has the name and must not be taken for it. That it is not, is
    # shown by every model that transformers makes for the tests of the engine.
    assert (REPO / "kernels" / "__init__.py").read_text("utf-8").count("=") == 0
