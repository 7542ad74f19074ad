"""An old Python gets one clear message from code that it can parse."""

from __future__ import annotations

import ast
import runpy
import sys
from pathlib import Path

import pytest

ENTRY = Path(__file__).resolve().parents[2] / "installer" / "__main__.py"


def test_the_entry_point_parses_on_python_3_6() -> None:
    ast.parse(ENTRY.read_text("utf-8"), feature_version=(3, 6))


def test_the_entry_point_has_no_syntax_of_newer_pythons() -> None:
    tree = ast.parse(ENTRY.read_text("utf-8"))
    newer = (ast.JoinedStr, ast.AnnAssign, ast.NamedExpr, ast.Match, ast.AsyncFunctionDef)
    assert not [node for node in ast.walk(tree) if isinstance(node, newer)]
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.returns is not None]


@pytest.mark.parametrize("version", [(3, 6, 15), (3, 10, 13), (2, 7, 18)])
def test_an_old_python_gets_one_clear_message_and_status_1(
    version: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "version_info", version)
    monkeypatch.setattr(sys, "argv", ["installer", "up"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ENTRY), run_name="__main__")
    assert ended.value.code == 1
    printed = capsys.readouterr().err
    assert "needs Python 3.11" in printed
    assert f"this is Python {version[0]}.{version[1]}" in printed
