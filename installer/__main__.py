"""Entry point of `python3 installer …`. Standard library only; it parses on old Pythons, so that they get a clear message."""

import sys

NEEDED = (3, 11)
TOO_OLD = (
    "Gatehouse needs Python {0}.{1} or newer; this is Python {2}.{3} ({4}).\n"
    "Install a newer version (on Debian or Ubuntu: apt-get install python3.11 python3.11-venv) "
    "and run: python3.11 installer ...\n"
)


def _main():  # type: () -> int
    if sys.version_info[:2] < NEEDED:
        sys.stderr.write(TOO_OLD.format(NEEDED[0], NEEDED[1], sys.version_info[0], sys.version_info[1], sys.executable))
        return 1
    from steps.command_line import main

    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(_main())
