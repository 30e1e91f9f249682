"""From corpus to training batches: documents -> tokens -> samples -> batches. numpy only; torch is not needed here."""
