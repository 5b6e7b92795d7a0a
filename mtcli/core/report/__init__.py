"""What people look at: progress, tables, plots and the HTML page."""
