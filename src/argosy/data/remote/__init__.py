"""Remote data: download public data sets, read remote inputs, and stream prepared corpora through a local cache."""
