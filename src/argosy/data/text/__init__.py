"""Text in: finding the input files, reading them in blocks and records, and turning text into token ids."""
