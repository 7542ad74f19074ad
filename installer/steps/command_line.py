"""The command line of the installer: its subcommands, and how errors are reported."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from steps import suite_command, up
from steps.choices import DEVICES
from steps.errors import InstallerError

_LATER = ("install", "bundle", "upgrade", "rollback", "uninstall")
_TEST_HELP = """usage: python3 installer test [pytest arguments]

Creates .venv with the test packages, then runs the test suite in the folder of the clone. Arguments are passed to pytest:
  python3 installer test                          the whole suite, in parallel parts, with a summary of failures and times
  python3 installer test tests/unit -k quota      a selection; paths are relative to the clone
  python3 installer test -- --help                pytest's own help
Tests that need PostgreSQL, a browser or a version of Triton are skipped if it is missing, and without a GPU kernels run in
the interpreter; GATEHOUSE_REQUIRE=postgres,browser,triton,gpu turns each of these into a failure.
"""


def main(arguments: Sequence[str]) -> int:
    """Run one subcommand and return the exit status: 0, 1 (failed), 2 (wrong usage), 130 (Ctrl-C)."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _as_interrupt)
    try:
        return _dispatch(list(arguments))
    except InstallerError as error:
        print(error.text(), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped. Run the same command again to continue.", file=sys.stderr)
        return 130


def _as_interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _dispatch(arguments: list[str]) -> int:
    name = arguments[0] if arguments else ""
    if name in _LATER:
        print(f"`installer {name}` is not available in this version; available are `up`, `test` and `doctor`.", file=sys.stderr)
        return 2
    if name == "test":
        if arguments[1:2] in (["-h"], ["--help"]):
            print(_TEST_HELP, end="")
            return 0
        return suite_command.run(arguments[2:] if arguments[1:2] == ["--"] else arguments[1:])
    options = _parser().parse_args(arguments)
    return up.doctor() if options.command == "doctor" else up.run(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python3 installer",
        description="Install and start Gatehouse from this clone. The installer changes nothing outside .venv.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    start = commands.add_parser(
        "up",
        help="install what is missing, then start in the foreground (Ctrl-C stops)",
        description="Install what is missing into .venv, then start Gatehouse in the foreground. Ctrl-C lets running requests "
        "finish, then stops.",
    )
    start.add_argument("--host", metavar="ADDRESS", help="address to listen on (default: 127.0.0.1)")
    start.add_argument("--port", metavar="PORT", help="port to listen on (default: 8000)")
    start.add_argument(
        "--data-dir", metavar="DIR", help="folder for the database, keys and models (default: the platform's data folder)"
    )
    start.add_argument(
        "--model", metavar="PATH", action="append", help="folder of a model to serve; repeatable (default: the demo model)"
    )
    start.add_argument(
        "--database", metavar="URL", help="sqlite:///PATH or postgresql://… (default: SQLite in the data folder)"
    )
    start.add_argument("--device", choices=DEVICES, help="device for the models (default: auto)")
    commands.add_parser("test", help="install the test packages too, then run the tests; arguments are passed to pytest")
    commands.add_parser("doctor", help="check this machine and the installation, with advice")
    return parser
