"""From a run spec to a job: placed on a cluster, rendered, applied, followed, stopped. Never imports torch."""
