"""The public Python API. `import argosy` offers its names; no other folder of Argosy imports this one."""
