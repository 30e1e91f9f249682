"""Names of the ranges that the engines mark in a trace of torch's profiler.

A collective belongs to the pass in whose range the host launches it. Collectives of gradients that are launched after the last
backward pass are in the range `LEFT_OVER`: nothing computes beside them.
"""

from __future__ import annotations

from torch.profiler import record_function

FORWARD, BACKWARD = "argosy forward", "argosy backward"
# The whole schedule of a pipeline, whose messages are between passes.
PIPELINE = "argosy pipeline"
# Gradients that are summed after the last backward pass.
LEFT_OVER = "argosy left-over gradients"

PASSES = (FORWARD, BACKWARD, PIPELINE)

# A context that marks a range of the trace, by name. Without a profiler it costs a few microseconds.
traced = record_function
