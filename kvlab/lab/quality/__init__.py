"""What a compressed cache costs in quality: a model reads real text through it, beside other caches."""
