"""The data pipeline: documents -> tokens -> samples -> batches. It uses numpy only and never imports torch."""
