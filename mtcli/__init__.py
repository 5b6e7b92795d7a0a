"""mtcli: text to a trained, evaluated and profiled large transformer."""
