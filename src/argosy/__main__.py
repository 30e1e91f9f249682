"""`python -m argosy` is the `argosy` command. Worker processes import this module too, to find what they run: they should
not pay for the command line."""

import os
import sys


def main() -> None:
    _require_utf8()
    from argosy.cli.app import main as run

    run()


def _require_utf8() -> None:
    """Start again in Python's UTF-8 mode where it is off and the locale has names for ASCII only.

    Python turns the mode on by itself in the locales C and POSIX unless PYTHONUTF8=0 is set. Without it, a file called `é.txt`
    or a prompt with an umlaut would be bytes that are no text.
    """
    if sys.getfilesystemencoding() == "ascii":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


if __name__ == "__main__":
    main()
