"""What a person sees in a terminal: progress, step lines, plots and number formats."""
