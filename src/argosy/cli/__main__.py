"""`python -m argosy.cli` is the `argosy` command."""

from argosy.cli.app import main

main()
