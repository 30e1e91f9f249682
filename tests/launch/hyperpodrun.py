"""HyperPod's own agent, started as `hyperpodrun` would start it. It asks for a torch before 2.12; later ones have an option of
their own that is called like one of the agent's, and the agent's has to win."""

from __future__ import annotations

import argparse

import hyperpod_elastic_agent.run as agent  # type: ignore[import-not-found]
from torch.distributed.run import get_args_parser


def _parser() -> argparse.ArgumentParser:
    parser = get_args_parser()
    for group in (parser, *parser._action_groups):
        group.conflict_handler = "resolve"
    return parser


agent.get_args_parser = _parser
agent.main()
