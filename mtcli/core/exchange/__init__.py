"""States what replicas keep, send and compute: a file per method, which sync and plan read."""
