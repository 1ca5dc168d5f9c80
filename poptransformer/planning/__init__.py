"""What a model takes on a device, and which of its layers go where, before a weight is loaded."""
