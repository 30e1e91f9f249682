"""Pipeline parallelism: consecutive parts of a model on different ranks, micro-batches on their way through them."""
