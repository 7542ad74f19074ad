"""The command line of the installer: its subcommands, and how mistakes are reported."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from steps import check, up
from steps.choices import DEVICES
from steps.refusal import Refusal

_LATER = ("install", "bundle", "upgrade", "rollback", "uninstall")
_TEST_HELP = """usage: python3 installer test [pytest arguments]

Makes .venv with the test packages, then runs the test suite from the clone's folder; every argument goes to pytest:
  python3 installer test                          everything, in parts side by side; at the end what failed and what took time
  python3 installer test tests/unit -k quota      a part, paths as seen from the clone
  python3 installer test -- --help                pytest's own help
What needs PostgreSQL, a browser or a version of Triton is skipped where there is none, and kernels are interpreted
without a GPU; GATEHOUSE_REQUIRE=postgres,browser,triton,gpu makes that a failure.
"""


def main(arguments: Sequence[str]) -> int:
    """Run one subcommand and return the exit status: 0, 1 (failed), 2 (wrong usage), 130 (Ctrl-C)."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _as_interrupt)
    try:
        return _dispatch(list(arguments))
    except Refusal as refusal:
        print(refusal.text(), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped. Run the same command again to continue.", file=sys.stderr)
        return 130


def _as_interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _dispatch(arguments: list[str]) -> int:
    name = arguments[0] if arguments else ""
    if name in _LATER:
        print(f"`installer {name}` is not in this version; `up`, `test` and `doctor` are.", file=sys.stderr)
        return 2
    if name == "test":
        if arguments[1:2] in (["-h"], ["--help"]):
            print(_TEST_HELP, end="")
            return 0
        return check.run(arguments[2:] if arguments[1:2] == ["--"] else arguments[1:])
    options = _parser().parse_args(arguments)
    return up.doctor() if options.command == "doctor" else up.run(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python3 installer", description="Installs and starts Gatehouse from this clone. Nothing outside .venv is changed."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    start = commands.add_parser(
        "up",
        help="install what is missing, then start in the foreground (Ctrl-C drains and stops)",
        description="Installs what is missing into .venv, then starts Gatehouse in the foreground. Ctrl-C drains and stops.",
    )
    start.add_argument("--host", metavar="ADDRESS", help="address to listen on (default 127.0.0.1)")
    start.add_argument("--port", metavar="PORT", help="port to listen on (default 8000)")
    start.add_argument(
        "--data-dir", metavar="DIR", help="folder for database, keys and models (default: the platform's data folder)"
    )
    start.add_argument(
        "--model", metavar="PATH", action="append", help="model folder to serve, repeatable (default: the demo model)"
    )
    start.add_argument(
        "--database", metavar="URL", help="sqlite:///PATH or postgresql://… (default: SQLite in the data folder)"
    )
    start.add_argument("--device", choices=DEVICES, help="where models run (default auto)")
    commands.add_parser("test", help="install the test packages too, then run the tests with the given pytest arguments")
    commands.add_parser("doctor", help="check this machine and the installation, and say what to do")
    return parser
