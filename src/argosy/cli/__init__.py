"""The command line: one small file per verb, no logic. Verbs import what they need only when they run."""
