"""What every Penstock service stands on and none owns."""
