"""Text input: find input files, read them in blocks and records, and tokenize text."""
