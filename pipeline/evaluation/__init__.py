"""What models are worth: metrics, statistics, studies, and pictures of attention."""
