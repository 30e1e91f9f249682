"""Using a trained model: sampling text from it, filling masks, evaluating it on a corpus."""
