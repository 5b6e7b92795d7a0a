"""Many models of one shape trained as one array (HFTA, arXiv:2102.02344)."""
