"""What a run is, as torch-free data: configuration, model shapes, rank grids, shardings, rules."""
