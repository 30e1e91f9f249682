"""Training: loss, optimiser, schedule, the step, the loop, evaluation, and reading what the model writes."""
