"""Defines the run config: schema, rules, loading, and the errors that users read. Imports no
torch."""
