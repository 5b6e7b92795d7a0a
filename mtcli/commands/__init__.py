"""One thin file per subcommand: parse, one call into core, print."""
