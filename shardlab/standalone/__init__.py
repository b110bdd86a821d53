"""Objects for other people's training scripts: LayerAdam and SlideFSDP."""
