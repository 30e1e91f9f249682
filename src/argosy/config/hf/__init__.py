"""Hugging Face's config.json and our model spec, both ways, without torch or transformers.

Whatever decides the numbers a model computes, or how it is trained, is either taken over or refused by its name and value;
what does not is on an explicit list with the reason. What current transformers leaves out of a file has the default its own config class has.
"""

from argosy.config.hf.families import (
    CONFIG,
    export_gap,
    from_config,
    key_fates,
    leaves,
    model_type_of,
    read_config,
    to_config,
)

__all__ = ["CONFIG", "export_gap", "from_config", "key_fates", "leaves", "model_type_of", "read_config", "to_config"]
