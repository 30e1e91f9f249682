"""Views of run directories: live view, dashboard, report, diagnosis. They read files only, so they work after the run has died,
and without torch."""
