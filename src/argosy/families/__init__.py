"""Model families: each module is one family, from its structural defaults to its weights in Hugging Face's files. No torch."""
