"""Questions and corpora in: the published formats, merging and splitting, a made-up world to search."""
