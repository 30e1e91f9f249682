"""From a corpus to training samples: their order, and what becomes of them (packed, masked, rearranged)."""
