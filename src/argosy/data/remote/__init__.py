"""Data that lies elsewhere: fetching public data sets, and streaming prepared corpora through a local cache."""
