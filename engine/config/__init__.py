"""The configuration in a model directory, checked before anything is loaded, and the model families. No torch."""
