"""The run directory: its paths, its append-only logs, and what a person sees of them on a terminal."""
