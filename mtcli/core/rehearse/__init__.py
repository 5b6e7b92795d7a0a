"""The real stage and step of any rank of any world, on fake tensors: what a step's memory is."""
