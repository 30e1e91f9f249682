"""Where the record of a run goes besides its directory: each sink takes records in order, and may fail."""
