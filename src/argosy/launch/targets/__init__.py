"""What starts the pods of a run: one file for each kind of job, all from the same pod body."""
