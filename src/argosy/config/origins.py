"""The origins of a run spec's values, which refusals name: `run.yaml:12`, `command line`, `preset gpt2`."""

from __future__ import annotations

# Maps a dotted key to where its value came from.
Origins = dict[str, str]
