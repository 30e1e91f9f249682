"""Sinks: TensorBoard, W&B, MLflow, Prometheus, OpenTelemetry and webhooks. Each takes a run's records in order, and may fail."""
