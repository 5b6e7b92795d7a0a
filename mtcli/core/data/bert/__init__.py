"""What BERT and other encoders with heads are trained on and tested with: rows and masks."""
