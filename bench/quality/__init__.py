"""What comes of speculation besides speed: which candidates are accepted, and what texts are like."""
