"""`argosy data prepare`: blocks of text become parts, parts become shards, in any number of processes."""
