"""Flight recorder, watchdog, consistency check and traffic counter of collectives."""
