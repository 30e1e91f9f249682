"""Curation: filters, masks and removal of duplicates, before a corpus is tokenised."""
