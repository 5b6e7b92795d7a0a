"""Training and test data of BERT and other encoders with heads: rows and masks."""
