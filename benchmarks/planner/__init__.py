"""Published and own measurements of training runs, and how well the planner predicts them."""
