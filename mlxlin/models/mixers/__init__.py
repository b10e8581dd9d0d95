"""Token mixers: what happens between the tokens of a layer."""
