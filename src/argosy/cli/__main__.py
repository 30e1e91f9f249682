"""The entry point of `python -m argosy.cli`, which is the `argosy` command."""

from argosy.cli.app import main

main()
