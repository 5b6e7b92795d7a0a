"""Published runs: read, predicted and scored (`mtcli plan --validate`)."""
