"""What a model directory says about its model, read and checked before anything is loaded; the families. No torch."""
