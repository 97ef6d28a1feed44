"""From settings to a trained model: optimisation, the Lightning modules, checkpoints, runs and tracking."""
