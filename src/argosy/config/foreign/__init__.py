"""Converters from other trainers' configurations to run specs. Settings without a counterpart are listed."""
