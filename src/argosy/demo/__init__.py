"""`argosy demo`: the whole journey in about two minutes on any machine, using the same commands a user would."""
