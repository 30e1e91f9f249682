"""Training: the optimiser, the learning-rate schedule, the step, the loop, saving and evaluation."""
