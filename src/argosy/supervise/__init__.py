"""Starting the ranks of a run, watching them, keeping evidence when one fails, and restarting them."""
