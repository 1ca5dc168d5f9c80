"""Generation: settings, rows, waves, stop conditions, results."""
