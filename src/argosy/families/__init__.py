"""Model families, without torch. A family module has everything from structural defaults to weight names in Hugging Face's files."""
