"""Task suites: lm-evaluation-harness with Argosy's models as its back end."""
