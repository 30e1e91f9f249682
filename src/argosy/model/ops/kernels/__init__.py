"""The Triton forms of `argosy.model.ops`. Only these modules need Triton."""

import os

# Triton 3.10 stops fusing multiply and add unless asked, which would change the bits of a resumed run; 3.9 warns about it.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
