"""Terminal output for people: progress bars, step lines, plots and number formats."""
