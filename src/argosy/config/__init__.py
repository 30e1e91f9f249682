"""The run spec: its typed schema, model presets, YAML and overrides, the origin of every value, and the arithmetic.

Nothing here imports torch, so a run spec can be read, checked, counted and shown on any laptop.
"""
