"""Plain PyTorch models built from a model spec, and their Hugging Face names. They know nothing of parallelism."""
