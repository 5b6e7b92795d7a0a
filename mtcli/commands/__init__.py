"""One thin file per subcommand: parses flags, calls core, prints the answer."""
