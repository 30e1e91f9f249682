"""The command line: one small file per command, no logic. A command imports what it needs only when it runs."""
