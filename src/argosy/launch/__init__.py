"""Launching: turn a run spec into a job by placing, rendering, applying, following and stopping it. Never imports torch."""
