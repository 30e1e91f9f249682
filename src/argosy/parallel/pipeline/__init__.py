"""Pipeline parallelism: consecutive stages of a model on different ranks, through which micro-batches pass."""
