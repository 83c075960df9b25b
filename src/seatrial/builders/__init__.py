"""From source to callable, inside the child. One file per way of building."""
