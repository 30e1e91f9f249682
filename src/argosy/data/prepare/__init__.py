"""`argosy data prepare`: tokenize blocks of text into parts and join the parts into shards, in any number of processes."""
