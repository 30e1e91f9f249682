"""The run directory: its paths, append-only metrics and events, heartbeats, rank logs, alerts and sinks."""
