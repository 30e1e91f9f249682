"""`python -m argosy` is the `argosy` command. Worker processes import this module too, to find what they run: they should
not pay for the command line."""


def main() -> None:
    from argosy.cli.app import main as run

    run()


if __name__ == "__main__":
    main()
