"""The Triton forms of `argosy.model.ops`: only what is imported from here needs Triton."""
