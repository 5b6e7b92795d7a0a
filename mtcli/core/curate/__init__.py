"""Cleans, filters, deduplicates and decontaminates a corpus, as Megatron-Turing NLG did."""
