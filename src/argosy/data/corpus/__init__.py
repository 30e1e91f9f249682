"""A prepared corpus on disk: its files, reading it, and the verbs that look at, check, merge and convert corpora."""
