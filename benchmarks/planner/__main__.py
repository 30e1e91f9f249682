"""The entry point of `python -m benchmarks.planner`, from the root of the repository."""

from benchmarks.planner.accuracy import main

main()
