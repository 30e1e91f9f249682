"""Run specs made from other trainers' settings: what they say in our words, and a list of what has no counterpart."""
