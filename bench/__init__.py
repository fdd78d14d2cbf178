"""What `draftline bench` and `lossless` measure; knows no engine, only streams of tokens."""
