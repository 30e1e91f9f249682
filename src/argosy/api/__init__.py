"""The public Python API. `import argosy` offers its names; nothing else in Argosy imports this room."""
