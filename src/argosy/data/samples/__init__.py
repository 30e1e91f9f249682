"""Training samples: their shuffled order, packing, document masks, and fill-in-the-middle."""
